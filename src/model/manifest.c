#include "model/manifest.h"

#include "io/file.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

/* 2^56 parameters of 16 bytes each still count in 63 bits; beyond that a config is nonsense. */
static const uint64_t weight_max = UINT64_C(1) << 56;
enum { COMPARED = 1 << 14 }; /* elements at a time */

static const fb_weight_desc *table_of(const fb_arch *a, fb_block_kind kind, uint32_t *n)
{
    switch (kind) {
    case FB_BLOCK_EMBED: *n = a->n_embed; return a->embed;
    case FB_BLOCK_LAYER: *n = a->n_layer; return a->layer;
    default:             *n = a->n_final; return a->final;
    }
}

static void write_name(fb_param *p, const fb_arch *a, const fb_block_desc *b, const char *name)
{
    int used = b->kind == FB_BLOCK_LAYER ? snprintf(p->name, sizeof p->name, a->layer_prefix, b->layer) : 0;
    int rest = snprintf(p->name + used, sizeof p->name - (size_t)used, "%s", name);
    assert((size_t)(used + rest) < sizeof p->name); /* names come from our own tables */
}

static uint64_t align_up(uint64_t n)
{
    return (n + FB_EXTENT_ALIGN - 1) / FB_EXTENT_ALIGN * FB_EXTENT_ALIGN;
}

/* Lays one block's parameters out behind m->params[m->n_param]. */
static fb_status add_block(fb_manifest *m, fb_block_kind kind, uint32_t layer, fb_error *err)
{
    const fb_model_config *c = &m->cfg;
    fb_block_desc         *b = &m->blocks[m->n_block];
    uint32_t               n;
    const fb_weight_desc  *table = table_of(c->arch, kind, &n);
    uint64_t               end = 0;
    *b = (fb_block_desc){ .kind = kind, .layer = layer, .param_first = m->n_param };
    for (int r = 0; r < FB_ROLE_COUNT; r++)
        b->offset[r] = -1;
    for (uint32_t i = 0; i < n; i++) {
        const fb_weight_desc *w = &table[i];
        if (!fb_weight_present(c, w->when))
            continue;
        fb_param *p = &m->params[m->n_param++];
        *p = (fb_param){ .role = w->role, .block = m->n_block, .rank = w->cols == FB_D_ONE ? 1 : 2,
                         .rows = fb_dim_size(c, w->rows), .cols = fb_dim_size(c, w->cols),
                         .decay = !(w->flags & FB_P_NO_DECAY) };
        write_name(p, c->arch, b, w->name);
        p->offset = w->flags & FB_P_JOIN ? end : align_up(end);
        uint64_t size = p->rows * p->cols; /* dimensions are below 2^31 */
        end = p->offset + size;
        m->n_weight += size;
        if (end > weight_max || m->n_weight > weight_max)
            return fb_fail(err, FB_INPUT, "describes a model of more than 2^56 parameters (at '%s')", p->name);
        b->offset[w->role] = (int64_t)p->offset;
        b->n_param++;
    }
    b->extent = align_up(end);
    b->before = m->n_block ? b[-1].before + fb_block_span(&b[-1]) : 0;
    m->extent += b->extent;
    if (kind == FB_BLOCK_LAYER && b->extent > m->extent_max_layer)
        m->extent_max_layer = b->extent;
    m->n_block++;
    return FB_OK;
}

fb_status fb_manifest_build(fb_manifest *out, fb_model_config *cfg, fb_error *err)
{
    fb_status      st = FB_OK;
    fb_manifest    m = { .cfg = *cfg };
    const fb_arch *a = cfg->arch;
    *cfg = (fb_model_config){ 0 };
    size_t n_param = (size_t)a->n_embed + (size_t)m.cfg.n_layer * a->n_layer + a->n_final;
    m.params = calloc(n_param, sizeof *m.params);
    m.blocks = calloc((size_t)m.cfg.n_layer + 2, sizeof *m.blocks);
    if (!m.params || !m.blocks) {
        st = fb_fail(err, FB_NOMEM, "no memory for a manifest of %zu tensors", n_param);
        goto done;
    }
    FB_TRY(add_block(&m, FB_BLOCK_EMBED, 0, err));
    for (uint32_t l = 0; l < m.cfg.n_layer; l++)
        FB_TRY(add_block(&m, FB_BLOCK_LAYER, l, err));
    FB_TRY(add_block(&m, FB_BLOCK_FINAL, 0, err));
    *out = m;
    return FB_OK;
done:
    fb_manifest_free(&m);
    return st;
}

fb_status fb_manifest_read(fb_manifest *out, const char *dir, fb_error *err)
{
    fb_model_config c = { 0 };
    char            path[FB_PATH_SIZE];
    fb_error        why;
    fb_status       st = fb_model_config_read(&c, dir, err);
    if (st != FB_OK)
        return st;
    st = fb_manifest_build(out, &c, &why);
    if (st == FB_OK || fb_path_join(path, sizeof path, dir, "config.json", err) != FB_OK)
        return st;
    return fb_fail_file(err, st, path, "%s", why.msg);
}

enum { SHAPE_SIZE = FB_RANK_MAX * 21 + 3 };

static const char *show_shape(char buf[SHAPE_SIZE], uint32_t rank, const uint64_t *shape)
{
    int used = snprintf(buf, SHAPE_SIZE, "[");
    for (uint32_t i = 0; i < rank; i++)
        used += snprintf(buf + used, SHAPE_SIZE - (size_t)used, "%s%llu", i ? "," : "", (unsigned long long)shape[i]);
    snprintf(buf + used, SHAPE_SIZE - (size_t)used, "]");
    return buf;
}

static fb_status check_shape(const fb_param *p, const fb_tensor *t, fb_error *err)
{
    char     have[SHAPE_SIZE], want[SHAPE_SIZE];
    uint64_t shape[2] = { p->rows, p->cols };
    if (t->rank == p->rank && memcmp(t->shape, shape, p->rank * sizeof *shape) == 0)
        return FB_OK;
    return fb_fail_file(err, FB_INPUT, fb_shard_path(t->shard), "'%.96s' is %s, the config says %s", t->name,
                        show_shape(have, t->rank, t->shape), show_shape(want, p->rank, shape));
}

static const fb_param *embedding(const fb_manifest *m)
{
    const fb_param *table = &m->params[m->blocks[0].param_first];
    assert(table->role == FB_ROLE_EMBED);
    return table;
}

static fb_status compare_bytes(bool *same, const fb_tensor *a, const fb_tensor *b, fb_error *err)
{
    fb_status st = FB_OK;
    uint64_t n = a->size / fb_dtype_size(a->dtype);
    unsigned char x[COMPARED * sizeof(float)], y[COMPARED * sizeof(float)];
    *same = a->dtype == b->dtype && a->size == b->size;
    for (uint64_t i = 0, k; *same && i < n; i += k) {
        k = n - i < COMPARED ? n - i : COMPARED;
        FB_TRY(fb_tensor_read(a, i, k, x, err));
        FB_TRY(fb_tensor_read(b, i, k, y, err));
        *same = memcmp(x, y, k * fb_dtype_size(a->dtype)) == 0;
    }
done:
    return st;
}

/* Two tensors that transformers passes over, or ties: a frequency buffer of old checkpoints, and a head written out
 * beside tied embeddings, which must then be the table again. */
static fb_status check_extra(const fb_manifest *m, const fb_tensor *t, const fb_shard_set *s, fb_error *err)
{
    const fb_arch *a = m->cfg.arch;
    const char    *file = fb_shard_path(t->shard);
    if (strstr(t->name, "rotary_emb.inv_freq"))
        return FB_OK;
    for (uint32_t i = 0; i < a->n_final; i++)
        if (a->final[i].role == FB_ROLE_HEAD && m->cfg.tied && strcmp(a->final[i].name, t->name) == 0) {
            const fb_tensor *table = fb_shard_set_find(s, embedding(m)->name);
            bool             same;
            fb_status        st = check_shape(embedding(m), t, err);
            if (st == FB_OK)
                st = compare_bytes(&same, t, table, err);
            if (st != FB_OK || same)
                return st;
            return fb_fail_file(err, FB_INPUT, file, "'%s' differs from '%s', but the config ties them; set "
                                "tie_word_embeddings to false or remove it", t->name, table->name);
        }
    return fb_fail_file(err, FB_INPUT, file, "'%.96s' is not a tensor of a %s with this config; unknown tensors are not trained "
                        "and would be lost", t->name, a->hf_name);
}

static int compare_param_name(const void *a, const void *b)
{
    return strcmp((*(const fb_param *const *)a)->name, (*(const fb_param *const *)b)->name);
}

static int compare_param_key(const void *key, const void *item)
{
    return strcmp(key, (*(const fb_param *const *)item)->name);
}

fb_status fb_manifest_check(const fb_manifest *m, const fb_shard_set *s, fb_error *err)
{
    fb_status        st = FB_OK;
    const fb_param **sorted = calloc(m->n_param, sizeof *sorted);
    if (!sorted)
        return fb_fail(err, FB_NOMEM, "no memory to check %u tensors", m->n_param);
    for (uint32_t i = 0; i < m->n_param; i++) {
        const fb_param  *p = sorted[i] = &m->params[i];
        const fb_tensor *t = fb_shard_set_find(s, p->name);
        if (!t) {
            uint64_t         shape[2] = { p->rows, p->cols };
            char             want[SHAPE_SIZE];
            const fb_tensor *any = fb_shard_set_at(s, 0);
            st = fb_fail_file(err, FB_INPUT, any ? fb_shard_path(any->shard) : "the checkpoint",
                              "'%s' is missing, the config says %s; no file of the checkpoint holds it", p->name,
                              show_shape(want, p->rank, shape));
            goto done;
        }
        FB_TRY(check_shape(p, t, err));
    }
    qsort(sorted, m->n_param, sizeof *sorted, compare_param_name);
    for (uint32_t i = 0; i < fb_shard_set_count(s); i++) {
        const fb_tensor *t = fb_shard_set_at(s, i);
        if (!bsearch(t->name, sorted, m->n_param, sizeof *sorted, compare_param_key))
            FB_TRY(check_extra(m, t, s, err));
    }
done:
    free(sorted);
    return st;
}

void fb_manifest_free(fb_manifest *m)
{
    free(m->params);
    free(m->blocks);
    fb_model_config_free(&m->cfg);
    *m = (fb_manifest){ 0 };
}
