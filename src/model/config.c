#include "model/config.h"

#include "io/file.h"
#include "io/json.h"
#include "model/arch.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>

enum { CONFIG_SIZE_MAX = 16 << 20, LAYER_MAX = 512 };

/* null says the same as absence, as in transformers. */
static const json_t *field(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

static void need(fb_json_reader *r, const json_t *object, const char *key)
{
    if (!field(object, key))
        fb_json_refuse(r, "has no '%s', which is needed", key);
}

static int64_t read_int(fb_json_reader *r, const json_t *object, const char *key, int64_t fallback, int64_t min, int64_t max)
{
    char          shown[FB_JSON_SHOWN_SIZE];
    const json_t *value = field(object, key);
    if (!value)
        return fallback;
    if (!json_is_integer(value) || json_integer_value(value) < min || json_integer_value(value) > max) {
        fb_json_refuse(r, "'%s' is %s; expected an integer from %lld to %lld", key, fb_json_show(shown, value), (long long)min,
                       (long long)max);
        return fallback;
    }
    return json_integer_value(value);
}

/* A size: from 1 to 2^31 - 1. */
static uint32_t read_size(fb_json_reader *r, const char *key, uint32_t fallback)
{
    if (fallback == 0)
        need(r, r->root, key);
    return (uint32_t)read_int(r, r->root, key, fallback, 1, INT32_MAX);
}

static double read_real(fb_json_reader *r, const json_t *object, const char *key, double fallback, double min, double max)
{
    char          shown[FB_JSON_SHOWN_SIZE];
    const json_t *value = field(object, key);
    if (!value)
        return fallback;
    double number = json_number_value(value);
    if (!json_is_number(value) || !(number >= min && number <= max)) {
        fb_json_refuse(r, "'%s' is %s; expected a number from %g to %g", key, fb_json_show(shown, value), min, max);
        return fallback;
    }
    return number;
}

static bool read_bool(fb_json_reader *r, const json_t *object, const char *key, bool fallback)
{
    char          shown[FB_JSON_SHOWN_SIZE];
    const json_t *value = field(object, key);
    if (!value)
        return fallback;
    if (!json_is_boolean(value))
        fb_json_refuse(r, "'%s' is %s; expected true or false", key, fb_json_show(shown, value));
    return json_is_true(value);
}

static const char *read_text(fb_json_reader *r, const json_t *object, const char *key, const char *fallback)
{
    char          shown[FB_JSON_SHOWN_SIZE];
    const json_t *value = field(object, key);
    if (value && !json_is_string(value))
        fb_json_refuse(r, "'%s' is %s; expected a string", key, fb_json_show(shown, value));
    return json_is_string(value) ? json_string_value(value) : fallback;
}

static void read_family(fb_json_reader *r, fb_model_config *c)
{
    char          known[128];
    const char   *type = read_text(r, r->root, "model_type", NULL);
    const json_t *names = field(r->root, "architectures");
    need(r, r->root, "model_type");
    if (r->st != FB_OK)
        return;
    c->arch = fb_arch_find(type);
    if (!c->arch) {
        fb_arch_names(known, sizeof known);
        fb_json_refuse(r, "model_type '%.64s' is not known; known are: %s", type, known);
        return;
    }
    if (!names)
        return;
    const char *name = json_string_value(json_array_get(names, 0));
    if (!name || json_array_size(names) != 1 || strcmp(name, c->arch->hf_name) != 0) {
        char shown[FB_JSON_SHOWN_SIZE];
        fb_json_refuse(r, "'architectures' is %s; of the family %s only [\"%s\"] is supported", fb_json_show(shown, names), type,
                       c->arch->hf_name);
    }
}

/* What would change the arithmetic and is not built. */
static void refuse_unsupported(fb_json_reader *r)
{
    char                     shown[FB_JSON_SHOWN_SIZE];
    static const char *const keys[] = { "quantization_config", "per_layer_config" };
    for (size_t i = 0; i < FB_COUNT(keys); i++)
        if (field(r->root, keys[i]))
            fb_json_refuse(r, "has a '%s', which is not supported; use a checkpoint without one", keys[i]);
    const char *act = read_text(r, r->root, "hidden_act", "silu");
    if (strcmp(act, "silu") != 0 && strcmp(act, "swish") != 0)
        fb_json_refuse(r, "hidden_act '%.64s' is not known; known are: silu, swish", act);
    if (read_real(r, r->root, "attention_dropout", 0, 0, 1) != 0)
        fb_json_refuse(r, "'attention_dropout' is %s; dropout is not supported, set it to 0",
               fb_json_show(shown, field(r->root, "attention_dropout")));
}

static void read_shape(fb_json_reader *r, fb_model_config *c)
{
    const fb_arch *a = c->arch;
    c->hidden = read_size(r, "hidden_size", 0);
    c->ffn_dim = read_size(r, "intermediate_size", 0);
    c->vocab = read_size(r, "vocab_size", 0);
    c->n_head = read_size(r, "num_attention_heads", 0);
    c->max_position = read_size(r, "max_position_embeddings", 0);
    need(r, r->root, "num_hidden_layers");
    c->n_layer = (uint32_t)read_int(r, r->root, "num_hidden_layers", 1, 1, LAYER_MAX);
    if (r->st != FB_OK)
        return;
    /* null means one per query head everywhere; absence means the family's default. */
    bool named = json_object_get(r->root, "num_key_value_heads") != NULL;
    c->n_kv_head = read_size(r, "num_key_value_heads", named || !a->n_kv_head_default ? c->n_head : a->n_kv_head_default);
    if (r->st == FB_OK && c->n_head % c->n_kv_head != 0)
        fb_json_refuse(r, "'num_attention_heads' is %u, which is not a multiple of 'num_key_value_heads', %u", c->n_head,
                       c->n_kv_head);
    if (!field(r->root, "head_dim") && !a->head_dim_default && c->hidden % c->n_head != 0)
        fb_json_refuse(r, "'hidden_size' is %u, which %u heads do not divide, and there is no 'head_dim'", c->hidden, c->n_head);
    if (r->st != FB_OK)
        return;
    c->head_dim = read_size(r, "head_dim", a->head_dim_default ? a->head_dim_default : c->hidden / c->n_head);
    if (r->st == FB_OK && c->head_dim % 2 != 0)
        fb_json_refuse(r, "the head size is %u; rotary positions need an even one", c->head_dim);
    if (r->st == FB_OK && (uint64_t)c->n_head * c->head_dim > INT32_MAX)
        fb_json_refuse(r, "%u heads of %u are wider than 2^31 - 1", c->n_head, c->head_dim);
    c->norm_eps = (float)read_real(r, r->root, "rms_norm_eps", a->norm_eps_default, 0, 1);
    c->tied = read_bool(r, r->root, "tie_word_embeddings", false);
    c->qkv_bias = a->qkv_bias_key ? read_bool(r, r->root, a->qkv_bias_key, a->qkv_bias_default) : a->qkv_bias_default;
    c->o_bias = a->o_bias_follows_key && c->qkv_bias;
    c->mlp_bias = a->mlp_bias_key && read_bool(r, r->root, a->mlp_bias_key, false);
    c->qk_norm = a->qk_norm;
}

static void set_window_bits(fb_model_config *c, uint32_t first)
{
    memset(c->layer_window_bits, 0, sizeof c->layer_window_bits);
    for (uint32_t l = first; c->sliding_window && l < c->n_layer; l++)
        c->layer_window_bits[l / 64] |= UINT64_C(1) << l % 64;
}

static bool window_bit(const fb_model_config *c, uint32_t layer)
{
    return c->layer_window_bits[layer / 64] >> layer % 64 & 1;
}

/* layer_types has the last word where the family reads it (with use_sliding_window); elsewhere the modelling code
 * passes over it, so it may only repeat what the family's rule says. */
static void read_layer_types(fb_json_reader *r, fb_model_config *c)
{
    const json_t *types = field(r->root, "layer_types");
    if (!types)
        return;
    if (!json_is_array(types) || json_array_size(types) != c->n_layer) {
        fb_json_refuse(r, "'layer_types' is not a list of %u names, one a layer", c->n_layer);
        return;
    }
    for (uint32_t l = 0; l < c->n_layer && r->st == FB_OK; l++) {
        const char *type = json_string_value(json_array_get(types, l));
        bool        slides = type && strcmp(type, "sliding_attention") == 0;
        if (!type || (!slides && strcmp(type, "full_attention") != 0))
            fb_json_refuse(r, "layer_types[%u] is '%.64s'; known are: full_attention, sliding_attention", l,
                           type ? type : "not a string");
        else if (slides && !c->sliding_window)
            fb_json_refuse(r, "layer_types[%u] is sliding_attention, but no sliding window is in force; set 'sliding_window'%s", l,
                   c->arch->window_by_flag ? " and 'use_sliding_window'" : "");
        else if (!c->arch->window_by_flag && slides != window_bit(c, l))
            fb_json_refuse(r, "layer_types[%u] is %s, but in the family %s every layer is the same", l, type, c->arch->model_type);
        else if (slides)
            c->layer_window_bits[l / 64] |= UINT64_C(1) << l % 64;
        else
            c->layer_window_bits[l / 64] &= ~(UINT64_C(1) << l % 64);
    }
}

static void read_window(fb_json_reader *r, fb_model_config *c)
{
    const fb_arch *a = c->arch;
    if (a->has_window) {
        bool on = !a->window_by_flag || read_bool(r, r->root, "use_sliding_window", false);
        bool named = json_object_get(r->root, "sliding_window") != NULL; /* null: none */
        int64_t window = read_int(r, r->root, "sliding_window", named ? 0 : a->window_default, on ? 1 : 0, INT32_MAX);
        c->sliding_window = on ? (uint32_t)window : 0;
        if (a->window_by_flag)
            c->first_window_layer =
                (uint32_t)read_int(r, r->root, "max_window_layers", a->window_layer_default, 0, INT32_MAX);
    }
    set_window_bits(c, c->first_window_layer);
    read_layer_types(r, c);
}

static const char *const rope_names[FB_ROPE_COUNT] = {
    [FB_ROPE_DEFAULT] = "default", [FB_ROPE_LINEAR] = "linear", [FB_ROPE_DYNAMIC] = "dynamic",
    [FB_ROPE_YARN] = "yarn", [FB_ROPE_LLAMA3] = "llama3",
};

static void read_rope_type(fb_json_reader *r, fb_rope *rope, const json_t *object)
{
    const char *name = read_text(r, object, "rope_type", NULL);
    if (!name) /* the older spelling */
        name = read_text(r, object, "type", "default");
    for (fb_rope_type t = 0; t < FB_ROPE_COUNT; t++)
        if (strcmp(name, rope_names[t]) == 0) {
            rope->type = t;
            return;
        }
    fb_json_refuse(r, "rope type '%.64s' is not known; known are: default, linear, dynamic, yarn, llama3", name);
}

/* Peng et al. 2023, section 3.4: attention is sharpened by 0.1 ln(s) + 1. */
static double yarn_mscale(double scale, double mscale)
{
    return scale <= 1 ? 1 : 0.1 * mscale * log(scale) + 1;
}

static void read_yarn(fb_json_reader *r, fb_rope *rope, const json_t *object)
{
    rope->beta_fast = read_real(r, object, "beta_fast", 32, 0, 1e6);
    rope->beta_slow = read_real(r, object, "beta_slow", 1, 0, 1e6);
    rope->beta_fast = rope->beta_fast == 0 ? 32 : rope->beta_fast; /* 0 counts as unset in transformers */
    rope->beta_slow = rope->beta_slow == 0 ? 1 : rope->beta_slow;
    if (rope->beta_fast < rope->beta_slow)
        fb_json_refuse(r, "'beta_fast' is %g, below 'beta_slow', %g", rope->beta_fast, rope->beta_slow);
    if (json_is_null(json_object_get(object, "truncate")))
        fb_json_refuse(r, "'truncate' is null; expected true or false");
    rope->truncate = read_bool(r, object, "truncate", true);
    double mscale = read_real(r, object, "mscale", 0, 0, 1e6), all = read_real(r, object, "mscale_all_dim", 0, 0, 1e6);
    double inferred = mscale != 0 && all != 0 ? yarn_mscale(rope->factor, mscale) / yarn_mscale(rope->factor, all)
                                              : yarn_mscale(rope->factor, 1);
    rope->attention_factor = read_real(r, object, "attention_factor", inferred, 0, 1e6);
}

static void read_rope(fb_json_reader *r, fb_model_config *c)
{
    fb_rope      *rope = &c->rope;
    const json_t *object = field(r->root, "rope_scaling");
    const char   *key = "rope_scaling";
    if (!object || (json_is_object(object) && json_object_size(object) == 0)) /* rope_scaling wins where it says anything */
        object = field(r->root, key = "rope_parameters");
    if (object && !json_is_object(object)) {
        fb_json_refuse(r, "'%s' is not an object", key);
        return;
    }
    if (field(object, "full_attention") || field(object, "sliding_attention"))
        fb_json_refuse(r, "'%s' differs by layer type, which is not supported", key);
    read_rope_type(r, rope, object);
    double outer = read_real(r, r->root, "rope_theta", c->arch->rope_theta_default, 1, 1e30);
    rope->theta = read_real(r, object, "rope_theta", outer, 1, 1e30);
    if (rope->theta == 1)
        fb_json_refuse(r, "'rope_theta' is 1; all frequencies would be equal");
    if (read_real(r, object, "partial_rotary_factor", 1, 0, 1) != 1 || read_real(r, r->root, "partial_rotary_factor", 1, 0, 1) != 1)
        fb_json_refuse(r, "'partial_rotary_factor' is not 1; partial rotation is not supported");

    rope->factor = 1;
    rope->attention_factor = 1;
    rope->original_max = c->max_position;
    if (rope->type == FB_ROPE_LLAMA3 || rope->type == FB_ROPE_YARN) {
        /* Inside, else the model's context; a value outside beats both, as in transformers. */
        int64_t inner = read_int(r, object, "original_max_position_embeddings", c->max_position, 1, INT32_MAX);
        rope->original_max = (uint32_t)read_int(r, r->root, "original_max_position_embeddings", inner, 1, INT32_MAX);
    }
    if (rope->type != FB_ROPE_DEFAULT) {
        bool ratio = rope->type == FB_ROPE_YARN && json_is_null(json_object_get(object, "factor"));
        if (!ratio)
            need(r, object, "factor");
        rope->factor = read_real(r, object, "factor", (double)c->max_position / rope->original_max, 1, 1e6);
    }
    if (rope->type == FB_ROPE_LLAMA3) {
        need(r, object, "low_freq_factor");
        need(r, object, "high_freq_factor");
        rope->low_freq_factor = read_real(r, object, "low_freq_factor", 1, 1e-6, 1e6);
        rope->high_freq_factor = read_real(r, object, "high_freq_factor", 4, 1e-6, 1e6);
        if (r->st == FB_OK && rope->high_freq_factor <= rope->low_freq_factor)
            fb_json_refuse(r, "'high_freq_factor' is %g; expected more than 'low_freq_factor', %g", rope->high_freq_factor,
                   rope->low_freq_factor);
    }
    if (rope->type == FB_ROPE_YARN)
        read_yarn(r, rope, object);
    if (rope->type == FB_ROPE_DYNAMIC && c->head_dim < 4)
        fb_json_refuse(r, "dynamic rope needs a head size of at least 4, this one is %u", c->head_dim); /* exponent d / (d - 2) */
}

static void read_dtype(fb_json_reader *r, fb_model_config *c)
{
    const char *name = read_text(r, r->root, "dtype", NULL);
    if (!name)
        name = read_text(r, r->root, "torch_dtype", fb_dtype_hf_str(FB_F32));
    for (fb_dtype d = 0; d < FB_DTYPE_COUNT; d++)
        if (strcmp(name, fb_dtype_hf_str(d)) == 0) {
            c->dtype = d;
            return;
        }
    fb_json_refuse(r, "dtype '%.64s' is not supported; supported are: float32, float16, bfloat16", name);
}

static void add_eos(fb_json_reader *r, fb_model_config *c, const json_t *value)
{
    char shown[FB_JSON_SHOWN_SIZE];
    if (!json_is_integer(value) || json_integer_value(value) < 0 || json_integer_value(value) >= c->vocab) {
        fb_json_refuse(r, "'eos_token_id' holds %s; expected token ids from 0 to %u", fb_json_show(shown, value), c->vocab - 1);
        return;
    }
    uint32_t id = (uint32_t)json_integer_value(value);
    for (uint32_t i = 0; i < c->n_eos; i++)
        if (c->eos[i] == id)
            return;
    if (c->n_eos == FB_EOS_MAX)
        fb_json_refuse(r, "'eos_token_id' brings more than %d ends of sequence", FB_EOS_MAX);
    else
        c->eos[c->n_eos++] = id;
}

static void read_eos(fb_json_reader *r, fb_model_config *c)
{
    const json_t *value = field(r->root, "eos_token_id"), *item;
    size_t        i;
    if (!json_is_array(value)) {
        if (value)
            add_eos(r, c, value);
        return;
    }
    json_array_foreach((json_t *)value, i, item)
        add_eos(r, c, item);
}

static void read_tokens(fb_json_reader *r, fb_model_config *c)
{
    /* null is none; absence is the family's default; some checkpoints write -1 for none. */
    int64_t bos = json_object_get(r->root, "bos_token_id") ? -1 : c->arch->bos_default;
    c->bos = read_int(r, r->root, "bos_token_id", bos, -1, (int64_t)c->vocab - 1);
    c->pad = read_int(r, r->root, "pad_token_id", -1, -1, (int64_t)c->vocab - 1);
    if (json_object_get(r->root, "eos_token_id"))
        read_eos(r, c);
    else if (c->arch->eos_default >= 0 && c->arch->eos_default < c->vocab)
        c->eos[c->n_eos++] = (uint32_t)c->arch->eos_default;
}

static fb_status parse_object(json_t **root, const char *json, const char *path, fb_error *err)
{
    json_error_t why;
    *root = json_loads(json, JSON_REJECT_DUPLICATES, &why);
    if (!*root)
        return fb_fail_file(err, FB_INPUT, path, "is not JSON with unique keys: %.120s (line %d)", why.text, why.line);
    if (json_is_object(*root))
        return FB_OK;
    json_decref(*root);
    *root = NULL;
    return fb_fail_file(err, FB_INPUT, path, "is not a JSON object");
}

fb_status fb_model_config_parse(fb_model_config *out, const char *json, const char *path, fb_error *err)
{
    fb_model_config c = { .bos = -1, .pad = -1 };
    json_t         *root;
    fb_status       st = parse_object(&root, json, path, err);
    if (st != FB_OK)
        return st;
    fb_json_reader r = { .where = path, .root = root, .err = err, .st = FB_OK };
    read_family(&r, &c);
    if (r.st == FB_OK) {
        refuse_unsupported(&r);
        read_shape(&r, &c);
    }
    if (r.st == FB_OK) { /* the rest divides by and counts on the shape */
        read_window(&r, &c);
        read_rope(&r, &c);
        read_dtype(&r, &c);
        read_tokens(&r, &c);
    }
    json_decref(root);
    if (r.st != FB_OK)
        return r.st;
    c.json = strdup(json);
    if (!c.json)
        return fb_fail_file(err, FB_NOMEM, path, "no memory to keep its text");
    *out = c;
    return FB_OK;
}

/* NULL text: there is no such file, and it may be absent. */
static fb_status read_text_file(char **text, const char *path, bool optional, fb_error *err)
{
    uint64_t size;
    *text = NULL;
    if (optional && !fb_file_exists(path))
        return FB_OK;
    fb_status st = fb_file_read(text, &size, path, CONFIG_SIZE_MAX, err);
    if (st == FB_OK && strlen(*text) != size) {
        free(*text);
        *text = NULL;
        st = fb_fail_file(err, FB_INPUT, path, "holds a NUL byte; expected JSON text");
    }
    return st;
}

fb_status fb_model_config_read(fb_model_config *out, const char *dir, fb_error *err)
{
    fb_status       st = FB_OK;
    fb_model_config c = { 0 };
    char            path[FB_PATH_SIZE], *text = NULL;
    json_t         *generation = NULL;
    FB_TRY(fb_path_join(path, sizeof path, dir, "config.json", err));
    FB_TRY(read_text_file(&text, path, false, err));
    FB_TRY(fb_model_config_parse(&c, text, path, err));
    free(text);
    text = NULL;

    /* Chat checkpoints name their end-of-turn tokens here and only the base model's end of text in config.json. */
    FB_TRY(fb_path_join(path, sizeof path, dir, "generation_config.json", err));
    FB_TRY(read_text_file(&text, path, true, err));
    if (text) {
        FB_TRY(parse_object(&generation, text, path, err));
        fb_json_reader r = { .where = path, .root = generation, .err = err, .st = FB_OK };
        read_eos(&r, &c);
        FB_TRY(r.st);
    }
    *out = c;
    c = (fb_model_config){ 0 };
done:
    json_decref(generation);
    free(text);
    fb_model_config_free(&c);
    return st;
}

void fb_model_config_free(fb_model_config *c)
{
    free(c->json);
    *c = (fb_model_config){ 0 };
}

uint32_t fb_model_config_window(const fb_model_config *c, uint32_t layer)
{
    return layer < c->n_layer && window_bit(c, layer) ? c->sliding_window : 0;
}
