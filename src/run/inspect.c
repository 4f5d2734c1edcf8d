/* inspect.c - `forebay inspect`: what a checkpoint's folder holds, tensor by tensor. */
#include <stdio.h>

#include "model/manifest.h"
#include "run/sink.h"

static const char *kind_str(fb_block_kind k)
{
    return k == FB_BLOCK_EMBED ? "embedding" : k == FB_BLOCK_LAYER ? "layer" : "final";
}

static json_t *shape_of(const fb_param *p)
{
    return p->rank == 1 ? json_pack("[I]", (json_int_t)p->rows) : json_pack("[I, I]", (json_int_t)p->rows, (json_int_t)p->cols);
}

static json_t *to_json(const fb_manifest *m, const fb_shard_set *set)
{
    const fb_model_config *c = &m->cfg;
    json_t *tensors = json_array();
    for (uint32_t i = 0; i < m->n_param; i++) {
        const fb_param *p = &m->params[i];
        const fb_tensor *t = fb_shard_set_find(set, p->name);
        json_array_append_new(tensors, json_pack("{s:s, s:o, s:s, s:I, s:s, s:i, s:s, s:b}", "name", p->name, "shape", shape_of(p),
            "dtype", fb_dtype_str(t->dtype), "bytes", (json_int_t)t->size, "role", fb_role_str(p->role), "block", (int)p->block,
            "kind", kind_str(m->blocks[p->block].kind), "decay", p->decay));
    }
    return json_pack("{s:s, s:s, s:I, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:b, s:i, s:o}", "model_type", c->arch->model_type,
        "architecture", c->arch->hf_name, "parameters", (json_int_t)m->n_weight, "hidden", (int)c->hidden, "layers",
        (int)c->n_layer,
        "heads", (int)c->n_head, "kv_heads", (int)c->n_kv_head, "head_dim", (int)c->head_dim, "ffn", (int)c->ffn_dim,
        "vocab", (int)c->vocab, "tied", c->tied, "blocks", (int)m->n_block, "tensors", tensors);
}

static void to_text(const fb_manifest *m, const fb_shard_set *set, const fb_sink *sink)
{
    const fb_model_config *c = &m->cfg;
    fb_say(sink, FB_SAY_RESULT,
           "%s (%s): %.1f M parameters, %u layers, hidden %u, %u heads (%u key-value) of %u, ffn %u, vocabulary %u%s",
           c->arch->hf_name, c->arch->model_type, (double)m->n_weight / 1e6, c->n_layer, c->hidden, c->n_head, c->n_kv_head,
           c->head_dim, c->ffn_dim, c->vocab, c->tied ? ", tied" : "");
    for (uint32_t i = 0; i < m->n_param; i++) {
        const fb_param *p = &m->params[i];
        const fb_tensor *t = fb_shard_set_find(set, p->name);
        char shape[48];
        if (p->rank == 1)
            snprintf(shape, sizeof shape, "[%llu]", (unsigned long long)p->rows);
        else
            snprintf(shape, sizeof shape, "[%llu,%llu]", (unsigned long long)p->rows, (unsigned long long)p->cols);
        fb_say(sink, FB_SAY_RESULT, "  block %-4u %-10s %-4s %-16s %s", p->block, fb_role_str(p->role), fb_dtype_str(t->dtype),
               shape, p->name);
    }
}

fb_status fb_inspect(const char *model_dir, bool json, const fb_sink *sink, fb_error *err)
{
    fb_status st = FB_OK;
    fb_manifest m = { 0 };
    fb_shard_set *set = NULL;
    FB_TRY(fb_manifest_read(&m, model_dir, err));
    FB_TRY(fb_shard_set_open(&set, model_dir, err));
    FB_TRY(fb_manifest_check(&m, set, err));
    if (!json) {
        to_text(&m, set, sink);
        goto done;
    }
    FB_TRY(fb_say_json(sink, to_json(&m, set), err));
done:
    fb_shard_set_close(set);
    fb_manifest_free(&m);
    return st;
}
