#include "plan/plan.h"

#include <stdio.h>

#include "base/align.h"

/* fb_grad_out sums the norm over tiles of so many elements. */
static const uint64_t NORM_TILE = 64u << 10;
enum { LOSS_ROWS_MIN = 32, LOSS_ROWS_MAX = 4096, SLAB_COUNT = 4 };
/* Slabs smaller than a block keep the host's share small; large enough that a copy runs at the link's rate. */
static const uint64_t SLAB_ELEMS_MAX = 16u << 20, OUT_ELEMS_LEAST = 64u << 20;

static uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static void set_device_names(fb_plan *p)
{
#define NAME_D(name_, text) p->device[FB_DEV_##name_].name = text;
#define NAME_H(name_, text) p->host[FB_HOST_##name_].name = text;
    FB_PLAN_DEVICE_MAP(NAME_D)
    FB_PLAN_HOST_MAP(NAME_H)
}

/* A power of two that no budget moves: the cut is part of the sums. */
static uint32_t loss_rows(uint32_t vocab, uint64_t logits_size, uint32_t t_max)
{
    uint32_t rows = LOSS_ROWS_MIN;
    while (rows < LOSS_ROWS_MAX && (uint64_t)rows * 2 * vocab * sizeof(float) <= logits_size)
        rows *= 2;
    return (uint32_t)min_u64(rows, max_u64(t_max, 1));
}

static uint64_t norm_tiles(uint64_t n)
{
    return (n + NORM_TILE - 1) / NORM_TILE * NORM_TILE;
}

static uint64_t largest_gradient(const fb_manifest *m)
{
    return max_u64(m->extent_max_layer, max_u64(m->blocks[0].extent, m->blocks[m->n_block - 1].extent));
}

/* Sizes for a given number of passes, place of the block inputs, and size of the buffer in which rounded gradients leave. */
static void lay_out_with(fb_plan *p, const fb_plan_request *r, uint32_t n_pass, bool inputs_on_host, uint64_t out_elems)
{
    const fb_manifest *m = r->manifest;
    const fb_model_config *c = &m->cfg;
    const fb_block_desc *embed = &m->blocks[0], *final = &m->blocks[m->n_block - 1];
    fb_layer_shape shape = { c, r->act, r->attention_scratch };
    uint64_t act = fb_dtype_size(r->act), grad = act, t = p->t_max;
    bool copied = fb_plan_grad_copied(r->act);

    p->n_pass = n_pass;
    p->micro_per_pass = (r->n_micro + n_pass - 1) / n_pass;
    uint64_t k = p->micro_per_pass, n_layer = c->n_layer;
    p->inputs_on_host = inputs_on_host;
    p->n_input = (uint32_t)(inputs_on_host ? k + FB_INPUT_SPARES : k * (r->train ? n_layer + 1 : 2));
    p->slot_size = fb_align(m->extent_max_layer * act);
    p->head_size = fb_align(final->extent * act) + (c->tied ? fb_align(embed->extent * act) : 0);
    p->input_size = fb_align(t * c->hidden * act);
    p->saved_size = r->train ? fb_layer_saved_size(&shape, r->recompute, t) : 0;
    p->acc_size = fb_align(m->extent_max_layer * sizeof(float));
    p->n_acc = copied ? 1 : 2;
    p->out_elems = norm_tiles(out_elems); /* whole norm tiles: where a large block is cut changes no sum */
    p->slab_elems = min_u64(SLAB_ELEMS_MAX, max_u64(m->extent_max_layer, c->tied ? embed->extent : final->extent));
    p->n_slab = SLAB_COUNT;
    p->meta_size = r->meta_size(p->t_max);
    p->n_rope = c->rope.type == FB_ROPE_DYNAMIC ? p->micro_per_pass : 1;
    uint64_t rope_len = max_u64(r->row_len, r->cache_len);
    p->rope_size = 2 * fb_align(rope_len * (c->head_dim / 2) * sizeof(float));
    p->cache_k_offset = fb_value_size(&shape, FB_V_QKV, r->cache_len);
    p->cache_size = p->cache_k_offset + fb_value_size(&shape, FB_V_K, r->cache_len);
    uint64_t logits = fb_align((uint64_t)p->loss_rows * c->vocab * sizeof(float));
    uint64_t loss_hidden = fb_align(t * c->hidden * act), rstd = fb_align(t * sizeof(float));
    uint64_t table = c->tied ? embed->extent : max_u64(embed->extent, final->extent);
    fb_recompute policy = r->train ? r->recompute : FB_RECOMPUTE_FULL;

    uint64_t d[FB_DEV_COUNT] = {
        [FB_DEV_SLOTS] = p->slots * p->slot_size,
        [FB_DEV_HEAD_SLOT] = p->head_size,
        [FB_DEV_INPUTS] = p->input_size * p->n_input,
        [FB_DEV_SAVED] = p->saved_size * k * n_layer,
        [FB_DEV_SCRATCH] = r->train ? fb_layer_scratch_size(&shape, policy, t) : fb_layer_temporaries_at(&shape, policy, t).d_act,
        /* logits; in bf16 their gradient too; hidden rows before and after the norm, and their gradients */
        [FB_DEV_LOSS] = logits + (r->train && copied ? fb_align((uint64_t)p->loss_rows * c->vocab * act) : 0)
                        + loss_hidden * (r->train ? 3 : 2) + rstd,
        [FB_DEV_META] = p->meta_size * k,
        [FB_DEV_ROPE] = p->rope_size * p->n_rope,
        [FB_DEV_CACHE] = n_layer * p->cache_size,
        [FB_DEV_SUMS] = fb_align(sizeof(double) * (m->n_block + 1)),
    };
    if (r->train) {
        if (n_pass > 1) /* earlier passes' embedding gradients come back there, one micro-batch at a time */
            d[FB_DEV_SCRATCH] = max_u64(d[FB_DEV_SCRATCH], p->input_size + p->meta_size);
        d[FB_DEV_DX] = inputs_on_host ? 0 : p->input_size * k;
        d[FB_DEV_ACC] = p->n_acc * p->acc_size;
        d[FB_DEV_TABLE_ACC] = fb_align(table * sizeof(float));
        d[FB_DEV_FINAL_ACC] = c->tied ? fb_align(final->extent * sizeof(float)) : 0;
        d[FB_DEV_GRAD_OUT] = copied ? fb_align(p->out_elems * grad) : 0;
    }
    /* The head runs when no layer does: it begins in the layers' scratch, and the ledger counts what goes beyond. */
    d[FB_DEV_LOSS] -= min_u64(d[FB_DEV_LOSS], d[FB_DEV_SCRATCH]);
    p->device_bytes = 0;
    for (int i = 0; i < FB_DEV_COUNT; i++) {
        p->device[i].offset = p->device_bytes;
        p->device[i].size = d[i];
        p->device_bytes += d[i];
    }
    p->loss_offset = p->device[FB_DEV_SCRATCH].offset;

    uint64_t n = m->extent, moments = r->train ? 4 * n : 0;
    uint64_t h[FB_HOST_COUNT] = {
        [FB_HOST_WEIGHTS] = act * n,
        [FB_HOST_REMAINDERS] = r->train && copied ? 2 * n : 0,
        [FB_HOST_M] = moments, [FB_HOST_V] = moments,
        [FB_HOST_GRADIENTS] = r->train && r->clip ? grad * n : 0,
        [FB_HOST_ACCUMULATORS] = r->train && n_pass > 1 && (copied || !r->clip) ? sizeof(float) * n : 0,
        [FB_HOST_SLABS] = r->train && !r->clip ? p->n_slab * fb_align(p->slab_elems * grad) : 0,
        [FB_HOST_INPUTS] = inputs_on_host ? p->input_size * k * n_layer : 0,
        [FB_HOST_ROWS] = r->train && n_pass > 1 ? p->input_size * r->n_micro : 0,
        [FB_HOST_STAGING] = 2 * p->input_size,
        [FB_HOST_BATCH] = p->meta_size * r->n_micro + p->rope_size * (c->rope.type == FB_ROPE_DYNAMIC ? r->n_micro : 1),
        [FB_HOST_RUNTIME] = r->runtime_bytes,
    };
    p->host_bytes = 0;
    for (int i = 0; i < FB_HOST_COUNT; i++) {
        p->host[i].size = h[i];
        p->host_bytes += h[i];
    }
}

/* The buffer for gradients takes what is left of the budget.  At best it holds any block's gradient whole, whose accumulator
 * is then free at once; the less it holds, the longer the next backward waits for the download of the pieces before. */
static void lay_out(fb_plan *p, const fb_plan_request *r, uint32_t n_pass, bool inputs_on_host)
{
    uint64_t most = largest_gradient(r->manifest), least = min_u64(most, OUT_ELEMS_LEAST);
    uint64_t out = r->unified ? least : most;
    lay_out_with(p, r, n_pass, inputs_on_host, out);
    while (r->hbm_budget && p->device_bytes > r->hbm_budget && out > least) {
        out = max_u64(out / 2, least);
        lay_out_with(p, r, n_pass, inputs_on_host, out);
    }
}

double fb_plan_step_flops(const fb_plan_request *r)
{
    const fb_manifest *m = r->manifest;
    const fb_model_config *c = &m->cfg;
    double tokens = (double)r->row_len * r->micro_rows * r->n_micro, runs = !r->train ? 2 : 6;
    double head = (double)c->vocab * c->hidden, layers = 0;
    for (uint32_t b = 1; b + 1 < m->n_block; b++)
        layers += (double)m->blocks[b].extent;
    /* Two products over half of row_len x row_len; a full recompute repeats the layers' forward, not the head's. */
    double attention = 2.0 * c->n_layer * c->n_head * c->head_dim * r->row_len / 2;
    return tokens * ((layers + attention) * (runs + (r->train && r->recompute == FB_RECOMPUTE_FULL ? 2 : 0)) + head * runs);
}

static double mib(uint64_t bytes)
{
    return (double)bytes / 0x1p20;
}

/* The key whose change frees the most of what the user can do without. */
static void remedy(char *buf, size_t size, const fb_plan *p, const fb_plan_request *r)
{
    char *at = buf;
    const char *end = buf + size;
    *at = 0;
#define SAY(...) do { int n_ = snprintf(at, (size_t)(end - at), __VA_ARGS__); at += n_ > 0 && n_ < end - at ? n_ : 0; } while (0)
    SAY("raise hbm_budget");
    if (p->slots > 2)
        SAY(", lower slots (%u)", p->slots);
    if (r->train && r->recompute != FB_RECOMPUTE_FULL)
        SAY(", set recompute: full");
    if (r->micro_rows > 1)
        SAY(", lower micro_batch (%u)", r->micro_rows);
    SAY(" or lower cutoff_len (%u)", r->row_len);
#undef SAY
}

/* A bound, from above, on what activations take.  Below 2^62 no sum of lay_out wraps: weights are at most 2^56. */
static bool is_countable(const fb_plan_request *r, uint64_t t)
{
    const fb_model_config *c = &r->manifest->cfg;
    double heads = ((double)c->n_head + c->n_kv_head) * c->head_dim;
    double token = 4 * (6 * (double)c->hidden + 6 * heads + 6 * (double)c->ffn_dim + 64); /* bytes in one layer, scratch too */
    return ((double)t * r->n_micro + r->cache_len) * token * ((double)c->n_layer + 4) < 0x1p62;
}

fb_status fb_plan_build(fb_plan *out, const fb_plan_request *r, fb_error *err)
{
    fb_plan p = { .slots = r->slots };
    set_device_names(&p);
    uint64_t t = (uint64_t)r->row_len * r->micro_rows;
    if (t == 0 || t > INT32_MAX / 2)
        return fb_fail(err, FB_CONFIG, "plan: a micro-batch of %u rows of %u tokens has %llu tokens, 1 to %d are possible",
                       r->micro_rows, r->row_len, (unsigned long long)t, INT32_MAX / 2);
    if (!is_countable(r, t))
        return fb_fail(err, FB_CONFIG, "plan: a step of %u micro-batches of %llu tokens needs more memory than any machine has; lower "
                       "gradient_accumulation_steps or per_device_train_batch_size", r->n_micro, (unsigned long long)t);
    p.t_max = (uint32_t)t;
    if (p.slots > r->manifest->cfg.n_layer)
        p.slots = r->manifest->cfg.n_layer;
    p.loss_rows = loss_rows(r->manifest->cfg.vocab, r->logits_size, p.t_max);

    /* The fewest passes that fit: each further pass moves all weights once more, which is dearer than moving the block
     * inputs to the host and back. */
    lay_out(&p, r, 1, false);
    if (r->train && r->hbm_budget)
        for (uint32_t n_pass = 1; p.device_bytes > r->hbm_budget && n_pass <= r->n_micro; n_pass++)
            for (int on_host = n_pass == 1; p.device_bytes > r->hbm_budget && on_host < 2; on_host++)
                lay_out(&p, r, n_pass, on_host);
    *out = p;
    if (r->hbm_budget && p.device_bytes > r->hbm_budget) {
        char how[200];
        remedy(how, sizeof how, &p, r);
        return fb_fail(err, FB_NOFIT, "plan: the device needs %.1f MiB, hbm_budget allows %.1f MiB, %.1f MiB are short; %s",
                       mib(p.device_bytes), mib(r->hbm_budget), mib(p.device_bytes - r->hbm_budget), how);
    }
    uint64_t host = p.host_bytes + (r->unified ? p.device_bytes : 0);
    if (r->ram_limit && r->ram_budget && host > r->ram_budget)
        return fb_fail(err, FB_NOFIT, "plan: host memory needs %.1f MiB%s, %s leaves %.1f MiB for it, %.1f MiB are short; free memory or "
                       "raise that limit%s, or take a smaller model", mib(host), r->unified ? " (device arena included)" : "",
                       r->ram_limit, mib(r->ram_budget), mib(host - r->ram_budget),
                       r->train && r->clip ? ", set max_grad_norm: 0 (no stored gradients)" : "");
    if (r->ram_budget && host > r->ram_budget)
        return fb_fail(err, FB_NOFIT, "plan: host memory needs %.1f MiB%s, ram_budget allows %.1f MiB, %.1f MiB are short; "
                       "raise ram_budget%s or take a smaller model", mib(host), r->unified ? " (device arena included)" : "",
                       mib(r->ram_budget), mib(host - r->ram_budget),
                       r->train && r->clip ? ", set max_grad_norm: 0 (no stored gradients)" : "");
    return FB_OK;
}
