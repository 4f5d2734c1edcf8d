#include "train/inputs.h"

#include <assert.h>
#include <stdlib.h>

static unsigned char *buffer(const fb_inputs *in, uint32_t b)
{
    return in->buffers + b * in->size;
}

static unsigned char *host_at(const fb_inputs *in, uint32_t layer, uint32_t i)
{
    return in->host + ((uint64_t)(in->plan->host_aliased ? 0 : layer) * in->k + i) * in->size;
}

/* Device policy: layer l's input of micro-batch i; without a backward two rows of places take turns. */
static unsigned char *place(const fb_inputs *in, uint32_t layer, uint32_t i)
{
    return buffer(in, (in->keep ? layer : layer & 1u) * in->k + i);
}

/* ---- what layers save ---- */

static uint64_t saved_size(const fb_inputs *in, uint32_t layer)
{
    return layer + in->plan->layout.n_rich >= in->n_layer ? in->plan->rich_size : in->plan->saved_size;
}

static unsigned char *saved_host_at(const fb_inputs *in, uint32_t layer, uint32_t i)
{
    return in->saved_host + fb_plan_saved_offset(in->plan, in->n_layer, in->plan->host_aliased ? 0 : layer, i);
}

/* One of the places that go round, in the order of visits. */
static unsigned char *saved_place(const fb_inputs *in, uint64_t visit)
{
    return in->saved + visit % FB_INPUT_SPARES * (in->plan->device[FB_DEV_SAVED].size / FB_INPUT_SPARES);
}

/* Without a backward one layer's room serves all. */
static unsigned char *saved_at(const fb_inputs *in, uint32_t layer, uint32_t i)
{
    return in->saved + (in->on_host ? 0 : fb_plan_saved_offset(in->plan, in->n_layer, in->keep ? layer : 0, i));
}

fb_status fb_inputs_init(fb_inputs *in, const fb_plan *plan, fb_device *device, unsigned char *arena, void *host,
                         void *saved_host, uint32_t n_layer, fb_error *err)
{
    fb_status st = FB_OK;
    *in = (fb_inputs){
        .device = device, .buffers = arena + plan->device[FB_DEV_INPUTS].offset, .dx = arena + plan->device[FB_DEV_DX].offset,
        .host = host, .size = plan->input_size, .n_layer = n_layer, .k = plan->micro_per_pass, .on_host = plan->layout.kept_on_host,
        .n_buffer = plan->n_input, .plan = plan, .saved = arena + plan->device[FB_DEV_SAVED].offset, .saved_host = saved_host,
    };
    in->current = calloc(in->k, sizeof *in->current);
    in->used = calloc(in->k, sizeof *in->used);
    in->buffer_free = calloc(in->n_buffer, sizeof(fb_event *));
    if (!in->current || !in->used || !in->buffer_free)
        FB_TRY(fb_fail(err, FB_NOMEM, "engine: no memory for %u block inputs", in->n_buffer));
    for (uint32_t b = 0; in->on_host && b < in->n_buffer; b++)
        FB_TRY(device->ops->event_new(device, &in->buffer_free[b], err));
    for (uint32_t a = 0; in->on_host && a < FB_INPUT_SPARES; a++) {
        FB_TRY(device->ops->event_new(device, &in->arrived[a], err));
        FB_TRY(device->ops->event_new(device, &in->saved_free[a], err));
    }
    FB_TRY(device->ops->event_new(device, &in->computed, err));
    FB_TRY(device->ops->event_new(device, &in->left, err));
done:
    return st;
}

static void free_event(const fb_inputs *in, fb_event *e)
{
    if (e)
        in->device->ops->event_free(in->device, e);
}

void fb_inputs_deinit(fb_inputs *in)
{
    for (uint32_t b = 0; in->buffer_free && b < in->n_buffer; b++)
        free_event(in, in->buffer_free[b]);
    for (uint32_t a = 0; a < FB_INPUT_SPARES; a++) {
        free_event(in, in->arrived[a]);
        free_event(in, in->saved_free[a]);
    }
    free_event(in, in->computed);
    free_event(in, in->left);
    free(in->current);
    free(in->used);
    free(in->buffer_free);
    *in = (fb_inputs){ 0 };
}

void fb_inputs_begin(fb_inputs *in, uint32_t count, bool keep)
{
    in->count = count;
    in->keep = keep;
    for (uint32_t i = 0; i < in->k; i++)
        in->current[i] = i;
    in->n_spare = in->on_host ? FB_INPUT_SPARES : 0;
    for (uint32_t s = 0; s < in->n_spare; s++)
        in->spare[s] = in->k + s;
    in->n_ahead = 0;
    in->next = 0;
    in->n_forward = 0;
}

void fb_inputs_set_used(fb_inputs *in, uint32_t i, uint64_t size)
{
    assert(size <= in->size);
    in->used[i] = size;
}

void *fb_inputs_first(const fb_inputs *in, uint32_t i)
{
    return in->on_host ? buffer(in, in->current[i]) : place(in, 0, i);
}

void *fb_inputs_last(const fb_inputs *in, uint32_t i)
{
    return in->on_host ? buffer(in, in->current[i]) : place(in, in->n_layer, i);
}

void *fb_inputs_dx(const fb_inputs *in, uint32_t i)
{
    return in->on_host ? buffer(in, in->current[i]) : in->dx + i * in->size;
}

/* ---- the spare buffers ---- */

static uint32_t take_spare(fb_inputs *in)
{
    assert(in->n_spare);
    uint32_t b = in->spare[0];
    for (uint32_t s = 1; s < in->n_spare; s++)
        in->spare[s - 1] = in->spare[s];
    in->n_spare--;
    return b;
}

/* b is free once stream s has done what it has been given so far. */
static fb_status give_spare(fb_inputs *in, uint32_t b, fb_stream s, fb_error *err)
{
    in->spare[in->n_spare++] = b;
    return in->device->ops->record(in->device, s, in->buffer_free[b], err);
}

/* ---- forward ---- */

fb_status fb_inputs_forward(fb_inputs *in, uint32_t layer, uint32_t i, void **x, void **y, unsigned char **saved, fb_error *err)
{
    fb_status st = FB_OK;
    *saved = saved_at(in, layer, i);
    if (!in->on_host) {
        *x = place(in, layer, i);
        *y = place(in, layer + 1, i);
        return FB_OK;
    }
    *x = buffer(in, in->current[i]);
    *y = buffer(in, in->spare[0]);
    FB_TRY(fb_traced_wait(in->device, in->trace, FB_LABEL(WAIT_INPUT, layer + 1, i), in->buffer_free[in->spare[0]], err));
    if (in->keep && saved_size(in, layer)) {
        *saved = saved_place(in, in->n_forward);
        FB_TRY(fb_traced_wait(in->device, in->trace, FB_LABEL(WAIT_INPUT, layer + 1, i),
                              in->saved_free[in->n_forward % FB_INPUT_SPARES], err));
    }
done:
    return st;
}

fb_status fb_inputs_forward_done(fb_inputs *in, uint32_t layer, uint32_t i, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_device_ops *ops = in->device->ops;
    if (!in->on_host)
        return FB_OK;
    uint32_t x = in->current[i], y = take_spare(in);
    in->current[i] = y;
    if (!in->keep)
        return give_spare(in, x, FB_STREAM_COMPUTE, err);
    /* The buffer is free when both the layer has read it and the copy has: the copy waits for the layer. */
    FB_TRY(ops->record(in->device, FB_STREAM_COMPUTE, in->computed, err));
    FB_TRY(ops->wait(in->device, FB_STREAM_D2H, in->computed, err));
    FB_TRY(fb_traced_download(in->device, in->trace, FB_LABEL(FETCH_INPUT, layer + 1, i), host_at(in, layer, i), buffer(in, x),
                              in->used[i], err));
    FB_TRY(give_spare(in, x, FB_STREAM_D2H, err));
    if (saved_size(in, layer)) {
        FB_TRY(fb_traced_download(in->device, in->trace, FB_LABEL(FETCH_INPUT, layer + 1, i),
                                  saved_host_at(in, layer, i),
                                  saved_place(in, in->n_forward), saved_size(in, layer), err));
        FB_TRY(ops->record(in->device, FB_STREAM_D2H, in->saved_free[in->n_forward % FB_INPUT_SPARES], err));
    }
    in->n_forward++;
done:
    return st;
}

/* ---- backward ---- */

/* Sends for inputs in the order in which the backward wants them, as far as there are spare buffers. */
static fb_status send_for(fb_inputs *in, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_device_ops *ops = in->device->ops;
    while (in->n_spare && in->next < (uint64_t)in->n_layer * in->count) {
        uint32_t layer = in->n_layer - 1 - (uint32_t)(in->next / in->count), i = (uint32_t)(in->next % in->count);
        uint32_t b = take_spare(in);
        FB_TRY(ops->wait(in->device, FB_STREAM_H2D, in->buffer_free[b], err));
        FB_TRY(fb_traced_upload(in->device, in->trace, FB_LABEL(SEND_INPUT, layer + 1, i), buffer(in, b), host_at(in, layer, i),
                                in->used[i], err));
        if (saved_size(in, layer)) {
            FB_TRY(ops->wait(in->device, FB_STREAM_H2D, in->saved_free[in->next % FB_INPUT_SPARES], err));
            FB_TRY(fb_traced_upload(in->device, in->trace, FB_LABEL(SEND_INPUT, layer + 1, i), saved_place(in, in->next),
                                    saved_host_at(in, layer, i),
                                    saved_size(in, layer), err));
        }
        FB_TRY(ops->record(in->device, FB_STREAM_H2D, in->arrived[in->next % FB_INPUT_SPARES], err));
        in->ahead[in->n_ahead++] = b;
        in->next++;
    }
done:
    return st;
}

fb_status fb_inputs_turn(fb_inputs *in, fb_error *err)
{
    fb_status st = FB_OK;
    if (!in->on_host)
        return FB_OK;
    FB_TRY(in->device->ops->record(in->device, FB_STREAM_D2H, in->left, err));
    FB_TRY(in->device->ops->wait(in->device, FB_STREAM_H2D, in->left, err));
    FB_TRY(send_for(in, err));
done:
    return st;
}

fb_status fb_inputs_backward(fb_inputs *in, uint32_t layer, uint32_t i, void **x, unsigned char **saved, fb_error *err)
{
    if (!in->on_host) {
        *saved = saved_at(in, layer, i);
        *x = place(in, layer, i);
        return FB_OK;
    }
    uint64_t order = (uint64_t)(in->n_layer - 1 - layer) * in->count + i;
    assert(in->n_ahead && order + in->n_ahead == in->next);
    *x = buffer(in, in->ahead[0]);
    *saved = saved_place(in, order);
    return fb_traced_wait(in->device, in->trace, FB_LABEL(WAIT_INPUT, layer + 1, i), in->arrived[order % FB_INPUT_SPARES], err);
}

fb_status fb_inputs_backward_done(fb_inputs *in, fb_error *err)
{
    if (!in->on_host)
        return FB_OK;
    fb_status st = FB_OK;
    uint32_t b = in->ahead[0];
    uint64_t order = in->next - in->n_ahead;
    for (uint32_t a = 1; a < in->n_ahead; a++)
        in->ahead[a - 1] = in->ahead[a];
    in->n_ahead--;
    FB_TRY(in->device->ops->record(in->device, FB_STREAM_COMPUTE, in->saved_free[order % FB_INPUT_SPARES], err));
    FB_TRY(give_spare(in, b, FB_STREAM_COMPUTE, err));
    FB_TRY(send_for(in, err));
done:
    return st;
}
