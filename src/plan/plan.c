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

static void set_names(fb_plan *p)
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

/* ---- what blocks own on the device ---- */

bool fb_plan_owns(const fb_plan *p, const fb_manifest *m, fb_own what, uint32_t block)
{
    bool home = fb_plan_at_home(p, m, block), copied = fb_plan_grad_copied(p->act);
    /* An untied embedding's gradient is made in the last pass alone. */
    bool over_passes = p->layout.n_pass > 1 && (m->cfg.tied || block > 0) && (home || p->layout.acc_on_device);
    bool accumulator = p->train && (over_passes || (home && p->clip && !copied));
    switch (what) {
    case FB_OWN_STATE:       return home;
    case FB_OWN_ACCUMULATOR: return accumulator;
    case FB_OWN_GRADIENT:    break;
    }
    return p->train && home && p->clip && !accumulator;
}

/* The layers that own one are the first of all: those at home, unless there is a reason that holds for all or none. */
static uint32_t layers_owning(const fb_plan *p, const fb_manifest *m, fb_own what)
{
    uint32_t n_layer = m->cfg.n_layer;
    return fb_plan_owns(p, m, what, n_layer) ? n_layer : fb_plan_owns(p, m, what, 1) ? p->layout.home_layers : 0;
}

uint64_t fb_plan_owned_before(const fb_plan *p, const fb_manifest *m, fb_own what, uint32_t block)
{
    const fb_block_desc *b = m->blocks;
    uint32_t last = m->n_block - 1, owning = layers_owning(p, m, what);
    uint64_t n = block > 0 && fb_plan_owns(p, m, what, 0) ? fb_block_span(&b[0]) : 0;
    n += block > 1 ? b[block < owning + 1 ? block : owning + 1].before - b[1].before : 0;
    return n + (block > last && fb_plan_owns(p, m, what, last) ? fb_block_span(&b[last]) : 0);
}

uint64_t fb_plan_saved_offset(const fb_plan *p, uint32_t n_layer, uint32_t layer, uint32_t micro)
{
    uint32_t plain = n_layer - p->layout.n_rich;
    uint64_t k = p->micro_per_pass;
    return layer < plain ? (layer * k + micro) * p->saved_size
                         : plain * k * p->saved_size + ((layer - plain) * k + micro) * p->rich_size;
}

/* ---- sizes ---- */

/* Elements of a block, if its gradient is summed where others' are too. */
static uint64_t sharing(const fb_plan *p, const fb_manifest *m, uint32_t block)
{
    return fb_plan_owns(p, m, FB_OWN_ACCUMULATOR, block) ? 0 : m->blocks[block].extent;
}

/* Elements of the largest block that streams; 0: none does. */
static uint64_t largest_streamed(const fb_plan *p, const fb_manifest *m)
{
    uint32_t last = m->n_block - 1;
    uint64_t n = p->layout.home_layers < m->cfg.n_layer ? m->extent_max_layer : 0;
    n = max_u64(n, fb_plan_at_home(p, m, 0) ? 0 : m->blocks[0].extent);
    return max_u64(n, fb_plan_at_home(p, m, last) ? 0 : m->blocks[last].extent);
}

static void clamp_layout(fb_plan *p, const fb_plan_request *r, const fb_layout *asked)
{
    fb_layout *l = &p->layout;
    uint32_t n_layer = r->manifest->cfg.n_layer;
    *l = *asked;
    l->n_pass = l->n_pass < 1 ? 1 : l->n_pass > r->n_micro ? r->n_micro : l->n_pass;
    p->micro_per_pass = (r->n_micro + l->n_pass - 1) / l->n_pass;
    l->n_pass = (r->n_micro + p->micro_per_pass - 1) / p->micro_per_pass;
    if (l->home_layers > n_layer)
        l->home_layers = n_layer;
    if (r->manifest->cfg.tied) /* one storage */
        l->home_embed = l->home_head = l->home_embed && l->home_head;
    if (l->slots > n_layer - l->home_layers)
        l->slots = n_layer - l->home_layers;
    if (!r->train)
        l->recompute = FB_RECOMPUTE_FULL, l->kept_on_host = false;
    if (!r->train || l->rich == l->recompute)
        l->rich = l->recompute, l->n_rich = 0;
    if (l->n_rich > n_layer)
        l->n_rich = n_layer;
    l->acc_on_device = l->acc_on_device && l->n_pass > 1;
}

static void device_sizes(fb_plan *p, const fb_plan_request *r, uint64_t d[FB_DEV_COUNT])
{
    const fb_manifest *m = r->manifest;
    const fb_model_config *c = &m->cfg;
    const fb_layout *l = &p->layout;
    fb_layer_shape shape = { c, r->act, r->attention_scratch(p->t_max, c->n_head, c->head_dim) };
    bool copied = fb_plan_grad_copied(r->act);
    uint32_t last = m->n_block - 1;
    uint64_t act = fb_dtype_size(r->act), t = p->t_max, k = p->micro_per_pass, n_layer = c->n_layer, rich = l->n_rich;
    uint64_t logits = fb_align((uint64_t)p->loss_rows * c->vocab * sizeof(float)), rstd = fb_align(t * sizeof(float));
    uint64_t home = fb_plan_owned_before(p, m, FB_OWN_STATE, m->n_block);
    d[FB_DEV_SLOTS] = l->slots * p->slot_size;
    d[FB_DEV_HEAD_SLOT] = l->home_head ? 0 : p->head_size;
    d[FB_DEV_INPUTS] = p->input_size * p->n_input;
    d[FB_DEV_SAVED] = l->kept_on_host ? FB_INPUT_SPARES * max_u64(n_layer > rich ? p->saved_size : 0, rich ? p->rich_size : 0)
                                      : k * ((n_layer - rich) * p->saved_size + rich * p->rich_size);
    fb_recompute policy = n_layer > rich ? l->recompute : l->rich;
    d[FB_DEV_SCRATCH] = r->train ? fb_layer_scratch_size(&shape, policy, t) : fb_layer_temporaries_at(&shape, policy, t).d_act;
    if (rich)
        d[FB_DEV_SCRATCH] = max_u64(d[FB_DEV_SCRATCH], fb_layer_scratch_size(&shape, l->rich, t));
    /* logits; in bf16 their gradient too; hidden rows before and after the norm, and their gradients */
    d[FB_DEV_LOSS] = logits + (r->train && copied ? fb_align((uint64_t)p->loss_rows * c->vocab * act) : 0)
                     + p->input_size * (r->train ? 3 : 2) + rstd;
    d[FB_DEV_META] = p->meta_size * k;
    d[FB_DEV_ROPE] = p->rope_size * p->n_rope;
    d[FB_DEV_CACHE] = n_layer * p->cache_size;
    d[FB_DEV_SUMS] = fb_align(sizeof(double) * (m->n_block + 1));
    d[FB_DEV_HOME_WEIGHTS] = fb_align(act * home);
    if (r->train) {
        if (l->n_pass > 1) /* earlier passes' embedding gradients come back there, one micro-batch at a time */
            d[FB_DEV_SCRATCH] = max_u64(d[FB_DEV_SCRATCH], p->input_size + p->meta_size);
        uint64_t table = c->tied ? sharing(p, m, 0) : max_u64(sharing(p, m, 0), sharing(p, m, last));
        d[FB_DEV_DX] = l->kept_on_host ? 0 : p->input_size * k;
        d[FB_DEV_ACC] = layers_owning(p, m, FB_OWN_ACCUMULATOR) < n_layer ? p->n_acc * p->acc_size : 0;
        d[FB_DEV_TABLE_ACC] = fb_align(table * sizeof(float));
        d[FB_DEV_FINAL_ACC] = c->tied ? fb_align(sharing(p, m, last) * sizeof(float)) : 0;
        d[FB_DEV_GRAD_OUT] = copied && largest_streamed(p, m) ? fb_align(p->out_elems * act) : 0;
        d[FB_DEV_HOME_REMAINDERS] = copied ? fb_align(2 * home) : 0;
        d[FB_DEV_HOME_M] = d[FB_DEV_HOME_V] = fb_align(4 * home);
        d[FB_DEV_HOME_GRADIENTS] = fb_align(act * fb_plan_owned_before(p, m, FB_OWN_GRADIENT, m->n_block));
        d[FB_DEV_BLOCK_ACC] = fb_align(4 * fb_plan_owned_before(p, m, FB_OWN_ACCUMULATOR, m->n_block));
    }
    /* The head runs when no layer does: it begins in the layers' scratch, and the ledger counts what goes beyond. */
    d[FB_DEV_LOSS] -= min_u64(d[FB_DEV_LOSS], d[FB_DEV_SCRATCH]);
}

static void host_sizes(fb_plan *p, const fb_plan_request *r, uint64_t h[FB_HOST_COUNT])
{
    const fb_manifest *m = r->manifest;
    const fb_layout *l = &p->layout;
    bool copied = fb_plan_grad_copied(r->act);
    uint64_t act = fb_dtype_size(r->act), k = p->micro_per_pass, n_layer = m->cfg.n_layer, n = 0;
    for (uint32_t b = 0; b < m->n_block; b++)
        n += fb_plan_at_home(p, m, b) ? 0 : m->blocks[b].extent;
    h[FB_HOST_WEIGHTS] = act * n;
    h[FB_HOST_STAGING] = l->home_embed ? 0 : 2 * p->input_size;
    h[FB_HOST_BATCH] = p->meta_size * r->n_micro + p->rope_size * (m->cfg.rope.type == FB_ROPE_DYNAMIC ? r->n_micro : 1);
    h[FB_HOST_WINDOW] = fb_plan_owned_before(p, m, FB_OWN_STATE, m->n_block) ? FB_WINDOW_ELEMS * sizeof(float) : 0;
    h[FB_HOST_SAVE_BUFFER] = r->save_bytes;
    h[FB_HOST_RUNTIME] = r->runtime_bytes;
    if (!r->train)
        return;
    h[FB_HOST_REMAINDERS] = copied ? 2 * n : 0;
    h[FB_HOST_M] = h[FB_HOST_V] = 4 * n;
    h[FB_HOST_GRADIENTS] = r->clip ? act * n : 0;
    h[FB_HOST_ACCUMULATORS] = l->n_pass > 1 && !l->acc_on_device && (copied || !r->clip) ? sizeof(float) * n : 0;
    h[FB_HOST_SLABS] = !r->clip && n ? p->n_slab * fb_align(p->slab_elems * act) : 0;
    h[FB_HOST_INPUTS] = l->kept_on_host ? p->input_size * k * n_layer : 0;
    h[FB_HOST_SAVED] = l->kept_on_host ? k * ((n_layer - l->n_rich) * p->saved_size + l->n_rich * p->rich_size) : 0;
    h[FB_HOST_ROWS] = l->n_pass > 1 ? p->input_size * r->n_micro : 0;
}

/* Sizes with a given size of the buffer in which rounded gradients leave. */
static void lay_out_with(fb_plan *p, const fb_plan_request *r, uint64_t out_elems)
{
    const fb_manifest *m = r->manifest;
    const fb_model_config *c = &m->cfg;
    const fb_layout *l = &p->layout;
    const fb_block_desc *embed = &m->blocks[0], *final = &m->blocks[m->n_block - 1];
    fb_layer_shape shape = { c, r->act, 0 };
    uint64_t act = fb_dtype_size(r->act), t = p->t_max, k = p->micro_per_pass;
    p->n_input = (uint32_t)(l->kept_on_host ? k + FB_INPUT_SPARES : k * (r->train ? c->n_layer + 1 : 2));
    p->slot_size = fb_align(m->extent_max_layer * act);
    p->head_size = fb_align(final->extent * act) + (c->tied ? fb_align(embed->extent * act) : 0);
    p->input_size = fb_align(t * c->hidden * act);
    p->saved_size = r->train ? fb_layer_saved_size(&shape, l->recompute, t) : 0;
    p->rich_size = l->n_rich ? fb_layer_saved_size(&shape, l->rich, t) : 0;
    p->acc_size = fb_align(m->extent_max_layer * sizeof(float));
    p->n_acc = fb_plan_grad_copied(r->act) ? 1 : 2;
    p->out_elems = norm_tiles(out_elems); /* whole norm tiles: where a large block is cut changes no sum */
    p->slab_elems = min_u64(SLAB_ELEMS_MAX, max_u64(m->extent_max_layer, c->tied ? embed->extent : final->extent));
    p->n_slab = SLAB_COUNT;
    p->meta_size = r->meta_size(p->t_max);
    p->n_rope = c->rope.type == FB_ROPE_DYNAMIC ? p->micro_per_pass : 1;
    uint64_t rope_len = max_u64(r->row_len, r->cache_len);
    p->rope_size = 2 * fb_align(rope_len * (c->head_dim / 2) * sizeof(float));
    p->cache_k_offset = fb_value_size(&shape, FB_V_QKV, r->cache_len);
    p->cache_size = p->cache_k_offset + fb_value_size(&shape, FB_V_K, r->cache_len);

    uint64_t d[FB_DEV_COUNT] = { 0 }, h[FB_HOST_COUNT] = { 0 };
    device_sizes(p, r, d);
    host_sizes(p, r, h);
    p->device_bytes = p->host_bytes = 0;
    for (int i = 0; i < FB_DEV_COUNT; i++) {
        p->device[i].offset = p->device_bytes;
        p->device[i].size = d[i];
        p->device_bytes += d[i];
    }
    p->loss_offset = p->device[FB_DEV_SCRATCH].offset;
    for (int i = 0; i < FB_HOST_COUNT; i++) {
        p->host[i].size = h[i];
        p->host_bytes += h[i];
    }
}

/* The buffer for gradients takes what is left of the budget.  At best it holds any block's gradient whole, whose accumulator
 * is then free at once; the less it holds, the longer the next backward waits for the download of the pieces before. */
void fb_plan_lay_out(fb_plan *p, const fb_plan_request *r, const fb_layout *l)
{
    *p = (fb_plan){ .t_max = r->row_len * r->micro_rows, .act = r->act, .train = r->train, .clip = r->clip };
    set_names(p);
    p->loss_rows = loss_rows(r->manifest->cfg.vocab, r->logits_size, p->t_max);
    clamp_layout(p, r, l);
    uint64_t most = max_u64(largest_streamed(p, r->manifest), 1), least = min_u64(most, OUT_ELEMS_LEAST);
    uint64_t out = r->unified ? least : most;
    lay_out_with(p, r, out);
    while (r->hbm_budget && p->device_bytes > r->hbm_budget && out > least) {
        out = max_u64(out / 2, least);
        lay_out_with(p, r, out);
    }
}

uint64_t fb_plan_device_short(const fb_plan *p, const fb_plan_request *r)
{
    return r->hbm_budget && p->device_bytes > r->hbm_budget ? p->device_bytes - r->hbm_budget : 0;
}

uint64_t fb_plan_host_short(const fb_plan *p, const fb_plan_request *r)
{
    uint64_t host = p->host_bytes + (r->unified ? p->device_bytes : 0);
    return r->ram_budget && host > r->ram_budget ? host - r->ram_budget : 0;
}

bool fb_plan_fits(const fb_plan *p, const fb_plan_request *r)
{
    return !fb_plan_device_short(p, r) && !fb_plan_host_short(p, r);
}

static double mib(uint64_t bytes)
{
    return (double)bytes / 0x1p20;
}

/* The keys whose change frees the most of what the user can do without. */
static void remedy(char *buf, size_t size, const fb_plan *p, const fb_plan_request *r)
{
    char *at = buf;
    const char *end = buf + size;
    const fb_layout *l = &p->layout;
    *at = 0;
#define SAY(...) do { int n_ = snprintf(at, (size_t)(end - at), __VA_ARGS__); at += n_ > 0 && n_ < end - at ? n_ : 0; } while (0)
    SAY("raise hbm_budget");
    if (l->home_layers || l->home_embed || l->home_head)
        SAY(", set placement: stream");
    if (l->slots > 2)
        SAY(", lower slots (%u)", l->slots);
    if (r->train && (l->recompute != FB_RECOMPUTE_FULL || l->n_rich))
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

fb_status fb_plan_check(const fb_plan_request *r, fb_error *err)
{
    uint64_t t = (uint64_t)r->row_len * r->micro_rows;
    if (t == 0 || t > INT32_MAX / 2)
        return fb_fail(err, FB_CONFIG, "plan: a micro-batch of %u rows of %u tokens has %llu tokens, 1 to %d are possible",
                       r->micro_rows, r->row_len, (unsigned long long)t, INT32_MAX / 2);
    if (!is_countable(r, t))
        return fb_fail(err, FB_CONFIG, "plan: a step of %u micro-batches of %llu tokens needs more memory than any machine has; "
                       "lower gradient_accumulation_steps or per_device_train_batch_size", r->n_micro, (unsigned long long)t);
    return FB_OK;
}

enum { SIDE_SIZE = 400 };

static void say_device(char text[SIDE_SIZE], const fb_plan *p, const fb_plan_request *r)
{
    char how[200];
    remedy(how, sizeof how, p, r);
    snprintf(text, SIDE_SIZE, "the device needs %.1f MiB, hbm_budget allows %.1f MiB, %.1f MiB are short; %s", mib(p->device_bytes),
             mib(r->hbm_budget), mib(fb_plan_device_short(p, r)), how);
}

/* limit_most: letters of the limit's name, so that what is to be done about it is not cut off behind it. */
static void say_host(char text[SIDE_SIZE], const fb_plan *p, const fb_plan_request *r, int limit_most)
{
    uint64_t is_short = fb_plan_host_short(p, r);
    double needs = mib(r->ram_budget + is_short);
    const char *arena = r->unified ? " (device arena included)" : "";
    const char *fewer = r->train && r->clip ? ", set max_grad_norm: 0 (no stored gradients)" : "";
    if (r->ram_limit)
        snprintf(text, SIDE_SIZE, "host memory needs %.1f MiB%s, %.*s leaves %.1f MiB for it, %.1f MiB are short; free memory or "
                 "raise that limit%s, or take a smaller model", needs, arena, limit_most, r->ram_limit, mib(r->ram_budget),
                 mib(is_short), fewer);
    else
        snprintf(text, SIDE_SIZE, "host memory needs %.1f MiB%s, ram_budget allows %.1f MiB, %.1f MiB are short; raise "
                 "ram_budget%s or take a smaller model", needs, arena, mib(r->ram_budget), mib(is_short), fewer);
}

fb_status fb_plan_refuse(const fb_plan *p, const fb_plan_request *r, fb_error *err)
{
    char device[SIDE_SIZE] = "", host[SIDE_SIZE] = "";
    bool device_short = fb_plan_device_short(p, r), host_short = fb_plan_host_short(p, r);
    if (!device_short && !host_short)
        return FB_OK;
    if (device_short)
        say_device(device, p, r);
    if (host_short)
        say_host(host, p, r, device_short ? 80 : 160);
    return fb_fail(err, FB_NOFIT, "plan: %s%s%s", device, device_short && host_short ? "; and " : "", host);
}

fb_status fb_plan_build(fb_plan *out, const fb_plan_request *r, const fb_layout *asked, fb_error *err)
{
    fb_status st = fb_plan_check(r, err);
    if (st != FB_OK)
        return st;
    fb_layout l = *asked;
    fb_plan_lay_out(out, r, &l);
    /* The fewest passes that fit: each further pass moves all streamed weights once more, which is dearer than moving what is kept
     * to the host and back. */
    bool capped = r->train && r->hbm_budget;
    for (l.n_pass = out->layout.n_pass; capped && out->device_bytes > r->hbm_budget && l.n_pass <= r->n_micro; l.n_pass++)
        for (int on_host = asked->kept_on_host; on_host < 2 && out->device_bytes > r->hbm_budget; on_host++) {
            l.kept_on_host = on_host;
            fb_plan_lay_out(out, r, &l);
        }
    return fb_plan_refuse(out, r, err);
}
