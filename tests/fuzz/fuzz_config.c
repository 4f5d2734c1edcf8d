/* config.json and, behind a 0xff byte, generation_config.json; then all that is computed from them without weights: the table
 * of tensors, the rope frequencies, the plan. */
#include "fuzz.h"

#include "model/manifest.h"
#include "model/rope.h"
#include "plan/plan.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint64_t meta_size(uint32_t t_max)
{
    return UINT64_C(64) * t_max;
}

static void check_manifest(const fb_manifest *m)
{
    FUZZ_REQUIRE(m->n_block == m->cfg.n_layer + 2, "%u blocks of %u layers", m->n_block, m->cfg.n_layer);
    for (uint32_t b = 0; b < m->n_block; b++) {
        const fb_block_desc *block = &m->blocks[b];
        uint32_t             end = block->param_first + block->n_param;
        FUZZ_REQUIRE(end <= m->n_param, "block %u ends at %u", b, end);
        for (uint32_t i = 0; i < block->n_param; i++) {
            const fb_param *p = &m->params[block->param_first + i];
            FUZZ_REQUIRE(p->rows && p->cols, "'%s' is empty", p->name);
            FUZZ_REQUIRE(p->offset + p->rows * p->cols <= block->extent, "'%s' passes its block's end", p->name);
        }
    }
}

static void check_rope(const fb_model_config *c)
{
    enum { HEAD_DIM_MAX = 512 };
    float         frequency[HEAD_DIM_MAX / 2], scale;
    fb_rope_state state = { 0 };
    if (c->head_dim > HEAD_DIM_MAX)
        return;
    fb_rope_advance(&state, c, c->max_position);
    fb_rope_frequencies(frequency, &scale, c, &state);
    for (uint32_t i = 0; i < c->head_dim / 2; i++)
        FUZZ_REQUIRE(!isnan(frequency[i]), "rope frequency %u is no number", i);
}

static uint64_t attention_scratch(uint32_t t_max, uint32_t n_head, uint32_t head_dim)
{
    return (uint64_t)t_max * n_head * head_dim;
}

static void check_plan(const fb_manifest *m)
{
    fb_plan         plan;
    fb_error        err;
    fb_layout       l = { .n_pass = 1, .slots = 2, .recompute = FB_RECOMPUTE_SELECTIVE, .rich = FB_RECOMPUTE_SELECTIVE };
    fb_plan_request r = { .manifest = m, .act = FB_BF16, .train = true, .clip = true, .row_len = 4096, .micro_rows = 4,
                          .n_micro = 8, .attention_scratch = attention_scratch,
                          .meta_size = meta_size, .logits_size = 256 << 20, .runtime_bytes = 1 << 20,
                          .hbm_budget = UINT64_C(16) << 30, .ram_budget = UINT64_C(256) << 30 };
    fb_status st = fb_plan_build(&plan, &r, &l, &err);
    if (st != FB_OK) {
        fuzz_refused(st, FB_NOFIT, &err, "");
        return;
    }
    FUZZ_REQUIRE(plan.device_bytes <= r.hbm_budget && plan.host_bytes <= r.ram_budget, "a plan beyond its budgets");
    FUZZ_REQUIRE(plan.host[FB_HOST_WEIGHTS].size >= 2 * m->n_weight, "%llu weights in %llu bytes", (unsigned long long)m->n_weight,
                 (unsigned long long)plan.host[FB_HOST_WEIGHTS].size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fb_error    err;
    fb_manifest m = { 0 };
    size_t      cut = fuzz_cut(data, size);
    fuzz_put("config.json", data, cut);
    fuzz_put("generation_config.json", cut < size ? data + cut + 1 : NULL, cut < size ? size - cut - 1 : 0);
    fb_status st = fb_manifest_read(&m, fuzz_folder(), &err);
    if (st != FB_OK) {
        fuzz_refused(st, FB_INPUT, &err, "config.json");
        return 0;
    }
    check_manifest(&m);
    for (uint32_t l = 0; l < m.cfg.n_layer; l++)
        fb_model_config_window(&m.cfg, l);
    check_rope(&m.cfg);
    check_plan(&m);
    fb_manifest_free(&m);
    return 0;
}
