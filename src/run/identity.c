#include "run/identity.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "config/key.h"
#include "run/dataset.h"
#include "run/session.h"

static const char *const groups[] = { "model", "data", "schedule" };

/* Members of config.json that change no number. */
static const char *const cosmetic[] = { "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version",
                                        "use_cache" };

static void set_sum(json_t *facts, const char *name, uint64_t sum)
{
    char digits[17];
    snprintf(digits, sizeof digits, "%016llx", (unsigned long long)sum);
    json_object_set_new(facts, name, json_string(digits));
}

static void set_keys(json_t *facts, const fb_options *o, const char *const *keys, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const fb_key *k = fb_key_find(keys[i]);
        assert(k);
        json_object_set_new(facts, keys[i], fb_key_json(o, k));
    }
}

static json_t *model_facts(const fb_model_config *c)
{
    json_t *facts = json_pack("{s:s}", "family", c->arch->hf_name), *config = json_loads(c->json, 0, NULL);
    for (size_t i = 0; i < FB_COUNT(cosmetic); i++)
        json_object_del(config, cosmetic[i]);
    char *text = json_dumps(config, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(17));
    if (text)
        set_sum(facts, "config.json", XXH3_64bits(text, strlen(text)));
    free(text);
    json_decref(config);
    return facts;
}

/* Of what is learned alone: the shard's own checksum covers its provenance too, and with it when the files were last touched. */
static uint64_t sum_of_tokens(const fb_tokens *t)
{
    uint64_t sum = XXH3_64bits(t->ids, t->n_token * sizeof *t->ids);
    sum = t->labels ? XXH3_64bits_withSeed(t->labels, t->n_token * sizeof *t->labels, sum)
                    : XXH3_64bits_withSeed(t->mask, t->n_token * sizeof *t->mask, sum);
    return XXH3_64bits_withSeed(t->doc_start, (t->n_doc + 1) * sizeof *t->doc_start, sum);
}

static const char micro_fact[] = "rows in a micro-batch";

static json_t *data_facts(const fb_options *o, const fb_tokens *tokens, uint32_t micro_rows)
{
    static const char *const keys[] = { "seed", "disable_shuffling", "cutoff_len" };
    uint32_t rows, preferred, n_micro;
    fb_session_batch(o, &rows, &preferred, &n_micro);
    json_t *facts = json_pack("{s:I, s:I, s:b, s:i, s:i}", "tokens", (json_int_t)tokens->n_token, "documents",
        (json_int_t)tokens->n_doc, "packing", fb_dataset_packing(o), "rows in a step", (int)rows, micro_fact,
        (int)micro_rows);
    set_sum(facts, "sum of the tokens", sum_of_tokens(tokens));
    set_keys(facts, o, keys, FB_COUNT(keys));
    return facts;
}

static json_t *schedule_facts(const fb_options *o, uint64_t total_steps)
{
    static const char *const keys[] = {
        "learning_rate", "lr_scheduler_type", "min_lr", "min_lr_rate", "num_stable_steps", "num_decay_steps", "min_lr_ratio",
        "warmup_type", "decay_type", "num_cycles", "warmup_ratio", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2",
        "adam_epsilon", "max_grad_norm",
    };
    json_t *facts = json_pack("{s:I}", "steps", (json_int_t)total_steps);
    set_keys(facts, o, keys, FB_COUNT(keys));
    return facts;
}

json_t *fb_identity_new(const fb_options *o, const fb_model_config *c, const fb_tokens *tokens, fb_dtype act, uint32_t micro_rows,
                        uint64_t total_steps)
{
    return json_pack("{s:o, s:o, s:o, s:s}", groups[0], model_facts(c), groups[1], data_facts(o, tokens, micro_rows), groups[2],
                     schedule_facts(o, total_steps), "compute_dtype", fb_dtype_hf_str(act));
}

uint32_t fb_identity_micro_rows(const json_t *identity)
{
    json_int_t n = json_integer_value(json_object_get(json_object_get(identity, groups[1]), micro_fact));
    return n > 0 && n < UINT32_MAX ? (uint32_t)n : 0;
}

void fb_identity_set_micro_rows(json_t *identity, uint32_t micro_rows)
{
    json_object_set_new(json_object_get(identity, groups[1]), micro_fact, json_integer(micro_rows));
}

const char *fb_identity_other_dtype(const json_t *then, const json_t *now)
{
    const json_t *was = json_object_get(then, "compute_dtype");
    return json_equal(was, json_object_get(now, "compute_dtype")) ? NULL : json_is_string(was) ? json_string_value(was) : "another";
}

/* A value as it is written; "nothing" where there is none. */
static void show(char out[48], const json_t *value)
{
    char *text = value ? json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9)) : NULL;
    snprintf(out, 48, "%.47s", text && !json_is_null(value) ? text : "nothing");
    free(text);
}

static bool same(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b)) /* 1.0 may be written 1 */
        return json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

fb_status fb_identity_check(const json_t *then, const json_t *now, const char *dir, fb_error *err)
{
    for (size_t i = 0; i < FB_COUNT(groups); i++) {
        const json_t *a = json_object_get(then, groups[i]), *b = json_object_get(now, groups[i]);
        const char *name;
        json_t *value;
        json_object_foreach((json_t *)b, name, value) {
            char was[48], is[48];
            if (same(json_object_get(a, name), value))
                continue;
            show(was, json_object_get(a, name));
            show(is, value);
            return fb_fail(err, FB_CONFIG, "%s: is of another %s: %s was %s, now it is %s; use the same, or start afresh with "
                           "resume_from_checkpoint: false in another output_dir or with overwrite_output_dir: true", dir, groups[i],
                           name, was, is);
        }
    }
    return FB_OK;
}
