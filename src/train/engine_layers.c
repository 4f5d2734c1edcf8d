/* engine_layers.c - the visits of decoder layers. */
#include "train/engine_parts.h"

static fb_layer_binding bind_layer(const fb_engine *e, uint32_t layer, const unsigned char *weights, uint32_t i, void *x,
                                   unsigned char *saved)
{
    const fb_micro *micro = &e->micros[e->first + i];
    fb_micro_arrays meta = fb_engine_meta_at(e, i);
    uint32_t keep = e->mode == MODE_TRAIN ? layer : 0; /* without a backward, one layer's room serves all */
    fb_recompute policy = e->o.train ? fb_plan_policy(&e->plan, e->m->cfg.n_layer, keep) : FB_RECOMPUTE_FULL;
    fb_layer_binding b = {
        .device = e->d, .shape = &e->shape, .desc = fb_engine_block_of_layer(e, layer),
        .window = fb_model_config_window(&e->m->cfg, layer), .policy = policy,
        .t = micro->t, .t_max = e->plan.t_max, .weights = weights,
        .position = meta.position, .span = meta.span, .n_span = micro->n_span,
        .q_len_max = micro->len_max, .k_len_max = micro->len_max + e->cache_row,
        .x = x, .scratch = fb_engine_region(e, FB_DEV_SCRATCH), .saved = saved,
    };
    fb_engine_bind_rope(e, i, &b.cos, &b.sin);
    if (e->plan.cache_size) {
        b.cache_qkv = fb_engine_region(e, FB_DEV_CACHE) + layer * e->plan.cache_size;
        b.cache_k = b.cache_qkv + e->plan.cache_k_offset;
        b.cache_row = e->cache_row;
    }
    return b;
}

fb_status fb_engine_visit_forward(fb_engine *e, uint32_t v, const fb_visit *visit, fb_error *err)
{
    fb_status st = FB_OK;
    uint32_t slot;
    const unsigned char *weights;
    FB_TRY(fb_engine_enter_layer(e, v, visit->layer, &slot, &weights, err));
    for (uint32_t i = 0; i < e->count; i++) {
        void *x, *y;
        unsigned char *saved;
        FB_TRY(fb_inputs_forward(&e->inputs, visit->layer, i, &x, &y, &saved, err));
        fb_layer_binding b = bind_layer(e, visit->layer, weights, i, x, saved);
        FB_TRY(fb_trace_begin(e->trace, FB_STREAM_COMPUTE, FB_LABEL(FORWARD, visit->layer + 1, e->first + i), 0, err));
        FB_TRY(fb_layer_forward(&b, y, err));
        FB_TRY(fb_trace_end(e->trace, FB_STREAM_COMPUTE, err));
        FB_TRY(fb_inputs_forward_done(&e->inputs, visit->layer, i, err));
    }
    FB_TRY(fb_engine_leave_layer(e, visit, slot, err));
done:
    return st;
}

fb_status fb_engine_visit_backward(fb_engine *e, uint32_t v, const fb_visit *visit, fb_error *err)
{
    fb_status st = FB_OK;
    uint32_t slot;
    const unsigned char *weights;
    FB_TRY(fb_engine_enter_layer(e, v, visit->layer, &slot, &weights, err));
    /* Not zeroed: the first micro-batch overwrites, and the padding between tensors has been zero from the start. */
    FB_TRY(fb_engine_open_accumulator(e, visit->layer + 1, false, err));
    for (uint32_t i = 0; i < e->count; i++) {
        void *x;
        unsigned char *saved;
        FB_TRY(fb_inputs_backward(&e->inputs, visit->layer, i, &x, &saved, err));
        fb_layer_binding b = bind_layer(e, visit->layer, weights, i, x, saved);
        b.gradients = fb_engine_accumulator(e, visit->layer + 1);
        FB_TRY(fb_trace_begin(e->trace, FB_STREAM_COMPUTE, FB_LABEL(BACKWARD, visit->layer + 1, e->first + i), 0, err));
        FB_TRY(fb_layer_backward(&b, fb_inputs_dx(&e->inputs, i), e->pass > 0 || i > 0, err));
        FB_TRY(fb_trace_end(e->trace, FB_STREAM_COMPUTE, err));
        FB_TRY(fb_inputs_backward_done(&e->inputs, err));
    }
    FB_TRY(fb_engine_leave_layer(e, visit, slot, err));
    FB_TRY(fb_engine_close_accumulator(e, visit->layer + 1, err));
done:
    return st;
}
