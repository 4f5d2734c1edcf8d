/* planning_rig.h - requests and machines for the tests of cost, simulation and search.  Include after tiny_model.h. */
#ifndef FB_TEST_PLANNING_RIG_H
#define FB_TEST_PLANNING_RIG_H

#include "plan/search.h"
#include "train/micro.h"

static inline uint64_t rig_attention_scratch(uint32_t t_max, uint32_t n_head, uint32_t head_dim)
{
    return (uint64_t)t_max * n_head * head_dim * 4;
}

/* Rates small enough that a tiny model's step takes a while; every curve flat. */
static inline fb_machine rig_machine(void)
{
    return (fb_machine){ .name = "rig", .device = "rig", .matmul_peak = 1e9, .matmul_rows = { 1, { 1 }, { 1 } },
                         .matmul_accumulate = 1,
        .attention_fwd = { 1, { 1 }, { 5e8 } }, .attention_bwd = { 1, { 1 }, { 4e8 } }, .memory_rate = 1e9, .launch = 0,
        .memory = 1u << 30, .h2d = { 1, { 1 }, { 1e7 } }, .d2h = { 1, { 1 }, { 1e7 } }, .h2d_both = 8e6, .d2h_both = 8e6,
        .dram = 1e8, .dram_dma = 8e7, .update = { 1, { 1 }, { 2e6 } }, .gather = 1e8, .cores = 4, .ram = 1u << 30 };
}

/* Copies and updates take no time worth the name. */
static inline fb_machine rig_no_link(void)
{
    fb_machine m = rig_machine();
    m.h2d.y[0] = m.d2h.y[0] = m.h2d_both = m.d2h_both = 1e18;
    m.update.y[0] = m.gather = m.dram = m.dram_dma = 1e18;
    return m;
}

static inline fb_plan_request rig_request(const fb_manifest *m, uint32_t rows, uint32_t micro_rows)
{
    return (fb_plan_request){ .manifest = m, .act = FB_BF16, .train = true, .clip = true, .row_len = 16, .micro_rows = micro_rows,
        .n_micro = (rows + micro_rows - 1) / micro_rows, .logits_size = 1u << 20, .attention_scratch = rig_attention_scratch,
        .meta_size = fb_micro_size, .runtime_bytes = 1000 };
}

static inline double rig_idle(const fb_timeline *t)
{
    double idle = 0;
    for (int i = 0; i < FB_CAUSE_COUNT; i++)
        idle += t->idle[i];
    return idle;
}

#endif
