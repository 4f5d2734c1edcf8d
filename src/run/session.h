/* session.h - everything a job holds open: model, plan, device, state, engine.
 *
 * Opened in the order in which data flows, and nothing large is allocated before the plan has been accepted.
 * Threads: one. */
#ifndef FB_RUN_SESSION_H
#define FB_RUN_SESSION_H

#include "config/options.h"
#include "base/memory.h"
#include "run/planning.h"
#include "train/engine.h"

/* What a session is for, and the batch it must hold. */
typedef struct fb_session_request {
    const fb_options *options;
    bool        train;
    bool        saves;     /* train: checkpoints in the background, for which there is a buffer */
    bool        alias_host; /* fb_plan.host_aliased; no ram_budget then means no limit */
    bool        resumes;   /* train: the weights come from a checkpoint, once the session has started */
    uint32_t    row_len;
    uint32_t    rows_per_step;       /* training; 0: micro_rows x n_micro, and no other cut will do */
    uint32_t    micro_rows, n_micro; /* rows in a micro-batch: what is preferred, and after planning what was chosen */
    uint32_t    cache_len; /* generate: tokens of the key-value cache */
    fb_activity *activity;  /* what is being done, for reports; NULL: nobody asks */
    const volatile sig_atomic_t *stop; /* not zero: loading weights ends with FB_STOPPED; NULL: never */
    uint32_t    trace_steps; /* > 0: when things run is recorded, and so many steps are kept */
} fb_session_request;

typedef struct fb_session {
    fb_manifest   manifest;
    fb_shard_set *shards;  /* closed once the weights are in place; NULL: they are random */
    fb_dtype      act;
    fb_plan       plan;
    fb_timeline   foreseen;   /* training: a step as the plan expects it; no spans */
    fb_machine    machine;    /* whose rates that is based on */
    char          machine_note[FB_MACHINE_NOTE_SIZE];
    fb_device    *device;
    fb_device_info info;
    uint64_t      device_host_bytes; /* host memory that opening the device took: its driver and libraries */
    fb_memory_room room;   /* of the host, where the user allows no sum */
    fb_team      *team;
    unsigned char *arena;
    fb_state      state;
    fb_engine    *engine;
    fb_trace     *trace;   /* NULL: none */
} fb_session;

/* The model's tables, checked against its files: a bad checkpoint is found before anything else is begun. */
fb_status fb_session_open(fb_session *s, const char *model_dir, fb_error *err);
/* The same for a shape alone, the text of a config.json; the weights will be random, from the option `seed`.  name: for
 * messages. */
fb_status fb_session_open_shape(fb_session *s, const char *config_json, const char *name, fb_error *err);
/* After fb_session_open: opens the device; what a plan for it is asked for. */
fb_status fb_session_ask(fb_session *s, const fb_session_request *r, fb_plan_request *out, fb_error *err);
/* After fb_session_open: opens the device, plans for it, and leaves the cut into micro-batches in the request; allocates
 * neither arena nor state.  May be called again with another request.  FB_NOFIT as fb_plan_search: the plan can then still be
 * looked at. */
fb_status fb_session_plan(fb_session *s, fb_session_request *r, fb_error *err);
/* After fb_session_plan: state with its weights, engine. */
fb_status fb_session_start(fb_session *s, const fb_session_request *r, fb_error *err);
void      fb_session_close(fb_session *s); /* a zeroed struct is fine */

/* What is really taken: host bytes held now (anonymous pages, without a unified device's arena), device bytes at most. */
typedef struct fb_session_memory {
    uint64_t host, device;
} fb_session_memory;

fb_session_memory fb_session_measure(const fb_session *s);
/* DIR/memory.json: planned and measured bytes of either side. */
fb_status fb_session_write_memory(const fb_session *s, const char *dir, fb_error *err);

/* Rows in a step, rows in a micro-batch and micro-batches in a step, as the options ask. */
void fb_session_batch(const fb_options *o, uint32_t *rows_per_step, uint32_t *micro_rows, uint32_t *n_micro);

#endif
