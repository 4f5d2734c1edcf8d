/* inputs.h - block inputs, and what layers save beside them, between the forward that makes them and the backward that
 * starts from them.
 *
 * On the device: every (layer, micro-batch) has its own place.  On the host: the device keeps one buffer a
 * micro-batch, its current activation in the forward and its gradient in the backward, and a few spare ones that go
 * round: a forward's input leaves for the host while the next micro-batch computes, and comes back ahead of its
 * backward.  What is saved has as many places that go round, and travels with its input.  Without a backward nothing leaves.
 * Lifetime: of one engine.  Threads: the engine's. */
#ifndef FB_TRAIN_INPUTS_H
#define FB_TRAIN_INPUTS_H

#include "device/device.h"
#include "plan/plan.h"
#include "sched/trace.h"

typedef struct fb_inputs {
    fb_device     *device;
    fb_trace      *trace;          /* NULL: none; set after init */
    unsigned char *buffers, *dx;   /* device: [n_buffer], and on_host false: [k] gradients */
    unsigned char *host;           /* on_host: [n_layer][k] */
    unsigned char *saved, *saved_host; /* device; on_host: what it lies in on the host, by fb_plan_saved_offset */
    const fb_plan *plan;           /* the engine's */
    uint64_t       size;           /* of one input */
    uint32_t       n_layer, k;     /* k: micro-batches in a pass */
    bool           on_host;
    /* of the pass in hand */
    bool           keep;           /* a backward follows */
    uint32_t       count;
    uint32_t      *current;        /* [k] buffer of micro-batch i */
    uint64_t      *used;           /* [k] bytes in use of an input, so that copies carry no slack */
    uint32_t       spare[FB_INPUT_SPARES], n_spare;            /* oldest first */
    uint32_t       ahead[FB_INPUT_SPARES], n_ahead;            /* sent for, in backward order, oldest first */
    uint64_t       next;           /* backward order: the next to send for */
    uint64_t       n_forward;      /* visits of this pass so far: whose turn it is among the places for what is saved */
    fb_event      *saved_free[FB_INPUT_SPARES];
    fb_event     **buffer_free;    /* [n_buffer] */
    fb_event      *computed, *left, *arrived[FB_INPUT_SPARES];
    uint32_t       n_buffer;
} fb_inputs;

/* host, saved_host: pinned, of the ledger's sizes. */
fb_status fb_inputs_init(fb_inputs *in, const fb_plan *plan, fb_device *device, unsigned char *arena, void *host,
                         void *saved_host, uint32_t n_layer, fb_error *err);
void      fb_inputs_deinit(fb_inputs *in); /* a zeroed struct is fine */

void      fb_inputs_begin(fb_inputs *in, uint32_t count, bool keep);
/* Bytes of micro-batch i's activations. */
void      fb_inputs_set_used(fb_inputs *in, uint32_t i, uint64_t size);
/* Where the embedding of micro-batch i goes; where the last layer's output is. */
void     *fb_inputs_first(const fb_inputs *in, uint32_t i);
void     *fb_inputs_last(const fb_inputs *in, uint32_t i);
/* The gradient of micro-batch i's activation.  On the host policy it lies where the activation was: the head has read
 * that when it writes this. */
void     *fb_inputs_dx(const fb_inputs *in, uint32_t i);
/* x and y of a layer's forward, and where it saves; then, its kernels enqueued, the other. */
fb_status fb_inputs_forward(fb_inputs *in, uint32_t layer, uint32_t i, void **x, void **y, unsigned char **saved, fb_error *err);
fb_status fb_inputs_forward_done(fb_inputs *in, uint32_t layer, uint32_t i, fb_error *err);
/* After the last forward: what left may be sent for. */
fb_status fb_inputs_turn(fb_inputs *in, fb_error *err);
fb_status fb_inputs_backward(fb_inputs *in, uint32_t layer, uint32_t i, void **x, unsigned char **saved, fb_error *err);
fb_status fb_inputs_backward_done(fb_inputs *in, fb_error *err);

#endif
