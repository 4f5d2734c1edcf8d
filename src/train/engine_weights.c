/* engine_weights.c - which block is on the device, and what is sent ahead. */
#include "train/engine_parts.h"

#include <assert.h>

/* Weights may be sent, and rows gathered, once their update is done. */
void fb_engine_await_update(fb_engine *e, uint32_t block)
{
    double since = fb_trace_now(e->trace);
    fb_activity_wait(e->o.activity, FB_WAIT_UPDATE, block);
    if (e->updater)
        fb_updater_wait(e->updater, block);
    fb_activity_wait(e->o.activity, FB_WAIT_NOTHING, 0);
    fb_trace_host(e->trace, FB_LABEL(HOST_UPDATE, block, FB_NO_PART), since);
}

static fb_status load_layer(fb_engine *e, uint32_t slot, uint32_t layer, uint32_t when, fb_error *err)
{
    fb_status st = FB_OK;
    device_slot *s = &e->device_slots[slot];
    uint32_t old = e->slots[slot].layer;
    if (old != FB_NEVER) {
        fb_block_move(&e->layer_state[old], FB_BLOCK_RELEASED);
        fb_block_move(&e->layer_state[old], FB_BLOCK_HOST);
    }
    e->slots[slot] = (fb_slot){ layer, when };
    fb_block_move(&e->layer_state[layer], FB_BLOCK_PREFETCHING);
    fb_engine_await_update(e, layer + 1);
    /* The kernels that read what was in the slot are enqueued, but the streams run apart. */
    FB_TRY(e->ops->wait(e->d, FB_STREAM_H2D, s->used, err));
    FB_TRY(fb_traced_upload(e->d, e->trace, FB_LABEL(SEND_WEIGHTS, layer + 1, slot), s->mem,
                            fb_state_at(e->o.state, FB_HOST_WEIGHTS, layer + 1, 0),
                            fb_engine_block_of_layer(e, layer)->extent * fb_dtype_size(e->o.act), err));
    FB_TRY(e->ops->record(e->d, FB_STREAM_H2D, s->loaded, err));
done:
    return st;
}

/* The head's slot: the last block's extent, then, when tied, the embedding's. */
static uint64_t head_extent_size(const fb_engine *e)
{
    return fb_align(e->m->blocks[e->m->n_block - 1].extent * fb_dtype_size(e->o.act));
}

/* Of the last block, or of a tied embedding, where the head reads them. */
const unsigned char *fb_engine_head_weights(const fb_engine *e, uint32_t block)
{
    if (fb_engine_at_home(e, block))
        return fb_state_device_at(e->o.state, FB_DEV_HOME_WEIGHTS, block, 0);
    return e->head.mem + (block + 1 == e->m->n_block ? 0 : head_extent_size(e));
}

fb_status fb_engine_load_head(fb_engine *e, fb_error *err)
{
    fb_status st = FB_OK;
    uint32_t last = e->m->n_block - 1;
    uint64_t size = fb_dtype_size(e->o.act);
    fb_engine_await_update(e, last);
    FB_TRY(e->ops->wait(e->d, FB_STREAM_H2D, e->head.used, err));
    FB_TRY(fb_traced_upload(e->d, e->trace, FB_LABEL(SEND_WEIGHTS, last, e->n_slot), e->head.mem,
                            fb_state_at(e->o.state, FB_HOST_WEIGHTS, last, 0), e->m->blocks[last].extent * size, err));
    if (e->m->cfg.tied) {
        fb_engine_await_update(e, 0);
        FB_TRY(fb_traced_upload(e->d, e->trace, FB_LABEL(SEND_WEIGHTS, 0, e->n_slot), e->head.mem + head_extent_size(e),
                                fb_state_at(e->o.state, FB_HOST_WEIGHTS, 0, 0), e->m->blocks[0].extent * size, err));
    }
    FB_TRY(e->ops->record(e->d, FB_STREAM_H2D, e->head.loaded, err));
    e->head_valid = true;
    e->head_awaited = false;
done:
    return st;
}

/* Sends ahead what the visits after v want, as far as slots go.  Only the very next visit is worth waiting for an
 * update: the kernels of this one are enqueued already, those of the next must not be held up by a later block. */
fb_status fb_engine_prefetch(fb_engine *e, uint32_t v, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_visit *visits = e->visits[e->backward];
    bool next_wanted = true;
    for (uint32_t q = v + 1; q < e->n_visit[e->backward]; q++) {
        const fb_visit *visit = &visits[q];
        if (visit->kind == FB_VISIT_HEAD) {
            if (e->head_valid || fb_engine_at_home(e, e->m->n_block - 1)) {
                next_wanted = false;
                continue;
            }
            if (!next_wanted && e->updater
                && (!fb_updater_is_clean(e->updater, e->m->n_block - 1) || !fb_updater_is_clean(e->updater, 0)))
                break;
            FB_TRY(fb_engine_load_head(e, err));
        } else if (visit->kind == FB_VISIT_FORWARD || visit->kind == FB_VISIT_BACKWARD) {
            if (!fb_engine_at_home(e, visit->layer + 1) && fb_slots_find(e->slots, e->n_slot, visit->layer) == FB_NEVER) {
                uint32_t slot = fb_slots_victim(e->slots, e->n_slot, q);
                if (slot == FB_NEVER || (!next_wanted && e->updater && !fb_updater_is_clean(e->updater, visit->layer + 1)))
                    break;
                FB_TRY(load_layer(e, slot, visit->layer, q, err));
            }
        }
        next_wanted = false;
    }
done:
    return st;
}

/* The slot (FB_NEVER: at home) and the weights of a layer whose kernels are about to be enqueued. */
fb_status fb_engine_enter_layer(fb_engine *e, uint32_t v, uint32_t layer, uint32_t *slot, const unsigned char **weights,
                                fb_error *err)
{
    fb_status st = FB_OK;
    if (fb_engine_at_home(e, layer + 1)) {
        *slot = FB_NEVER;
        *weights = fb_state_device_at(e->o.state, FB_DEV_HOME_WEIGHTS, layer + 1, 0);
        fb_block_move(&e->layer_state[layer], FB_BLOCK_COMPUTING);
        return FB_OK;
    }
    *slot = fb_slots_find(e->slots, e->n_slot, layer);
    if (*slot == FB_NEVER) {
        *slot = fb_slots_victim(e->slots, e->n_slot, v);
        assert(*slot != FB_NEVER); /* before its own visit every other block is wanted later */
        FB_TRY(load_layer(e, *slot, layer, v, err));
    }
    if (e->layer_state[layer] == FB_BLOCK_PREFETCHING) {
        FB_TRY(fb_traced_wait(e->d, e->trace, FB_LABEL(WAIT_WEIGHTS, layer + 1, FB_NO_PART), e->device_slots[*slot].loaded, err));
        fb_block_move(&e->layer_state[layer], FB_BLOCK_RESIDENT);
    }
    fb_block_move(&e->layer_state[layer], FB_BLOCK_COMPUTING);
    *weights = e->device_slots[*slot].mem;
done:
    return st;
}

fb_status fb_engine_leave_layer(fb_engine *e, const fb_visit *visit, uint32_t slot, fb_error *err)
{
    fb_block_move(&e->layer_state[visit->layer], FB_BLOCK_RESIDENT);
    if (slot == FB_NEVER)
        return FB_OK;
    e->slots[slot].next_use = visit->next;
    return e->ops->record(e->d, FB_STREAM_COMPUTE, e->device_slots[slot].used, err);
}

void fb_engine_forget(fb_engine *e)
{
    for (uint32_t i = 0; i < e->n_slot; i++) {
        uint32_t layer = e->slots[i].layer;
        if (layer == FB_NEVER)
            continue;
        if (e->layer_state[layer] == FB_BLOCK_PREFETCHING) /* sent ahead, then not visited: the upload is awaited by */
            fb_block_move(&e->layer_state[layer], FB_BLOCK_RESIDENT); /* whatever is uploaded next: h2d is in order */
        fb_block_move(&e->layer_state[layer], FB_BLOCK_RELEASED);
        fb_block_move(&e->layer_state[layer], FB_BLOCK_HOST);
        e->slots[i] = (fb_slot){ FB_NEVER, 0 };
    }
    e->head_valid = false;
}
