/* engine_update.c - updates of the blocks that live on the device: no gradient travels, and no weight. */
#include "train/engine_parts.h"

/* A checkpoint has what it wants of the block, or the compute stream waits until it has. */
static fb_status let_it_be_read(fb_engine *e, uint32_t block, fb_error *err)
{
    bool read;
    double since = fb_trace_now(e->trace);
    fb_activity_wait(e->o.activity, FB_WAIT_SAVER, 0);
    fb_status st = e->hooks.before_update_at_home(e->hooks.ctx, block, &read, err);
    fb_activity_wait(e->o.activity, FB_WAIT_NOTHING, 0);
    fb_trace_host(e->trace, FB_LABEL(HOST_SAVER, block, FB_NO_PART), since);
    if (st != FB_OK || !read)
        return st;
    return fb_engine_compute_after(e, FB_LABEL(WAIT_SAVER, block, FB_NO_PART), FB_STREAM_D2H, e->state_read, err);
}

/* The gradient: rounded, where it waits for the norm; else the accumulator, rounded on the way in. */
static const void *gradient_of(const fb_engine *e, uint32_t block, uint64_t first, fb_dtype *dtype)
{
    if (fb_plan_owns(&e->plan, e->m, FB_OWN_GRADIENT, block)) {
        *dtype = e->o.act;
        return fb_state_device_at(e->o.state, FB_DEV_HOME_GRADIENTS, block, first);
    }
    *dtype = FB_F32;
    return fb_engine_accumulator(e, block) + first;
}

fb_status fb_engine_update_at_home(fb_engine *e, uint32_t block, const double *guard, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_state *s = e->o.state;
    const fb_decay *decay = fb_updater_decay(e->updater);
    FB_TRY(let_it_be_read(e, block, err));
    FB_TRY(fb_trace_begin(e->trace, FB_STREAM_COMPUTE, FB_LABEL(UPDATE_AT_HOME, block, FB_NO_PART), 0, err));
    for (uint32_t r = decay->first[block]; r < decay->first[block + 1]; r++) {
        const fb_decay_range *d = &decay->ranges[r];
        fb_update u = { .act = e->o.act, .n = d->n, .w = fb_state_device_at(s, FB_DEV_HOME_WEIGHTS, block, d->first),
            .low = e->o.act == FB_BF16 ? fb_state_device_at(s, FB_DEV_HOME_REMAINDERS, block, d->first) : NULL,
            .m = fb_state_device_at(s, FB_DEV_HOME_M, block, d->first), .v = fb_state_device_at(s, FB_DEV_HOME_V, block, d->first),
            .adamw = fb_adamw_scalars_of(&e->adamw, d->decay), .guard = guard };
        u.g = gradient_of(e, block, d->first, &u.g_dtype);
        FB_TRY(e->k->update(e->d, &u, err));
    }
    FB_TRY(fb_trace_end(e->trace, FB_STREAM_COMPUTE, err));
done:
    return st;
}
