#include "run/session.h"

#include <stdio.h>
#include <string.h>

#include "base/memory.h"
#include "config/parse.h"
#include "device/cpu/cpu.h"
#include "io/file.h"
#include "run/planning.h"

void fb_session_batch(const fb_options *o, uint32_t *rows_per_step, uint32_t *micro_rows, uint32_t *n_micro)
{
    *rows_per_step = o->per_device_train_batch_size * o->gradient_accumulation_steps;
    *micro_rows = o->micro_batch != FB_AUTO ? o->micro_batch : o->per_device_train_batch_size;
    if (*micro_rows > *rows_per_step)
        *micro_rows = *rows_per_step;
    *n_micro = (*rows_per_step + *micro_rows - 1) / *micro_rows;
}

fb_status fb_session_open(fb_session *s, const char *model_dir, fb_error *err)
{
    fb_status st = FB_OK;
    *s = (fb_session){ 0 };
    FB_TRY(fb_manifest_read(&s->manifest, model_dir, err));
    FB_TRY(fb_shard_set_open(&s->shards, model_dir, err));
    FB_TRY(fb_manifest_check(&s->manifest, s->shards, err));
done:
    if (st != FB_OK)
        fb_session_close(s);
    return st;
}

fb_status fb_session_open_shape(fb_session *s, const char *config_json, const char *name, fb_error *err)
{
    fb_model_config cfg;
    *s = (fb_session){ 0 };
    fb_status st = fb_model_config_parse(&cfg, config_json, name, err);
    return st != FB_OK ? st : fb_manifest_build(&s->manifest, &cfg, err);
}

static fb_status open_device(fb_session *s, const fb_options *o, fb_error *err)
{
    uint64_t before = fb_memory_resident();
    fb_status st = fb_device_open(&s->device, &(fb_device_options){ .backend = o->backend, .index = o->device,
        .n_thread = o->compute_threads, .memory_max = o->hbm_budget, .deterministic = o->full_determinism,
        .inline_run = !o->overlap }, err);
    if (st != FB_OK)
        return st;
    uint64_t after = fb_memory_resident();
    s->device_host_bytes = after > before ? after - before : 0;
    s->device->ops->info(s->device, &s->info);
    return FB_OK;
}

/* Left of the device's memory where the user names no sum: libraries load code when a shape is new, and
 * fail without room for it. */
static const uint64_t AUTO_RESERVE = 512u << 20;

/* Bytes for the arena: what the user allows, else what is free, less what the back end takes beside it.  0: no limit. */
static uint64_t arena_budget(const fb_session *s, const fb_options *o)
{
    uint64_t left = s->info.memory_free, budget = o->hbm_budget ? o->hbm_budget : left > AUTO_RESERVE ? left - AUTO_RESERVE : left;
    return budget > s->info.memory_overhead ? budget - s->info.memory_overhead : budget ? 1 : 0;
}

/* Bytes for the host side: what the user allows, else what can be had less what no ledger sees.  0: no limit. */
static uint64_t host_budget(const fb_options *o, fb_memory_room *room)
{
    if (o->ram_budget || !fb_memory_room_now(room))
        return o->ram_budget;
    uint64_t unseen = fb_memory_unseen(room->bytes);
    return room->bytes > unseen ? room->bytes - unseen : 1;
}

fb_status fb_session_ask(fb_session *s, const fb_session_request *r, fb_plan_request *out, fb_error *err)
{
    const fb_options *o = r->options;
    fb_status st = s->device ? FB_OK : open_device(s, o, err);
    if (st != FB_OK)
        return st;
    s->act = o->compute_dtype == FB_DTYPE_AUTO ? s->info.dtype : (fb_dtype)o->compute_dtype;
    uint32_t n_thread = o->compute_threads ? o->compute_threads : fb_core_count();
    *out = (fb_plan_request){
        .manifest = &s->manifest, .act = s->act, .train = r->train, .clip = o->max_grad_norm > 0, .row_len = r->row_len,
        .micro_rows = r->micro_rows, .n_micro = r->n_micro, .cache_len = r->cache_len,
        .unified = s->info.unified, .logits_size = s->info.logits_size, .attention_scratch = s->device->kernels->attention_scratch,
        .meta_size = fb_micro_size,
        .runtime_bytes = fb_planning_runtime(s->info.unified, n_thread, s->device_host_bytes),
        .hbm_budget = arena_budget(s, o), .ram_budget = host_budget(o, &s->room), .ram_limit = o->ram_budget ? NULL : s->room.limit,
    };
    return FB_OK;
}

/* Forward only: nothing to choose but slots, of which two are enough to stream through. */
static fb_status plan_forward(fb_session *s, const fb_session_request *r, const fb_plan_request *p, fb_error *err)
{
    fb_layout l = { .n_pass = 1, .slots = r->options->slots == FB_AUTO ? 2 : r->options->slots, .recompute = FB_RECOMPUTE_FULL };
    return fb_plan_build(&s->plan, p, &l, err);
}

fb_status fb_session_plan(fb_session *s, fb_session_request *r, fb_error *err)
{
    fb_status st = FB_OK;
    fb_plan_request p;
    fb_wishes wishes;
    FB_TRY(fb_session_ask(s, r, &p, err));
    if (!r->train)
        return plan_forward(s, r, &p, err);
    uint32_t rows = r->rows_per_step ? r->rows_per_step : r->micro_rows * r->n_micro;
    FB_TRY(fb_planning_wishes(&wishes, r->options, &s->manifest, s->info.unified, rows, err));
    if (!r->rows_per_step)
        wishes.micro_rows = r->micro_rows;
    if (r->alias_host && !r->options->ram_budget)
        p.ram_budget = 0;
    fb_planning_machine(&s->machine, s->machine_note, &s->info);
    st = fb_planning_search(&s->plan, &s->foreseen, &p, &s->machine, &wishes, r->options, r->saves, err);
    r->micro_rows = p.micro_rows;
    r->n_micro = p.n_micro;
    s->plan.host_aliased = r->alias_host;
done:
    return st;
}

fb_status fb_session_start(fb_session *s, const fb_session_request *r, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_options *o = r->options;
    uint32_t n_core = fb_core_count();
    if (!fb_adamw_select(o->update_kernel))
        FB_TRY(fb_fail(err, FB_CONFIG, "update_kernel: this processor has no '%s'; use auto", o->update_kernel));
    FB_TRY(fb_team_new(&s->team, n_core, "host", err));
    fb_activity_enter(r->activity, FB_PHASE_LOAD, 0);
    void *arena;
    FB_TRY(s->device->ops->alloc(s->device, s->plan.device_bytes, &arena, err));
    s->arena = arena;
    FB_TRY(fb_state_init(&s->state, &s->manifest, &s->plan, s->arena, s->device, s->team, err));
    s->state.stop = r->stop;
    if (s->shards && !r->resumes)
        FB_TRY(fb_state_load(&s->state, s->shards, s->team, err));
    if (!s->shards)
        FB_TRY(fb_state_randomize(&s->state, o->seed, s->team, err));
    fb_shard_set_close(s->shards);
    s->shards = NULL;
    uint32_t update_threads = o->update_threads ? o->update_threads : n_core;
    if (r->trace_steps)
        FB_TRY(fb_trace_new(&s->trace, &(fb_trace_options){ .device = s->device, .n_block = s->manifest.n_block,
            .n_span = fb_engine_trace_spans(&s->plan, &s->manifest), .n_slot = s->plan.layout.slots, .n_worker = update_threads,
            .n_step = r->trace_steps }, err));
    FB_TRY(fb_engine_new(&s->engine, &(fb_engine_options){ .plan = &s->plan, .device = s->device, .state = &s->state,
        .arena = s->arena, .team = s->team, .act = s->act, .train = r->train,
        .clip = o->max_grad_norm > 0, .overlap = o->overlap, .n_micro = r->n_micro,
        .update_threads = update_threads, .trace = s->trace, .activity = r->activity }, err));
done:
    return st; /* what has been opened is closed by fb_session_close */
}

void fb_session_close(fb_session *s)
{
    fb_engine_free(s->engine);
    fb_trace_free(s->trace);
    if (s->state.device)
        fb_state_deinit(&s->state);
    if (s->arena)
        s->device->ops->free(s->device, s->arena);
    if (s->device)
        s->device->ops->close(s->device);
    fb_team_free(s->team);
    fb_shard_set_close(s->shards);
    fb_manifest_free(&s->manifest);
    *s = (fb_session){ 0 };
}

fb_session_memory fb_session_measure(const fb_session *s)
{
    fb_session_memory held;
    uint64_t now;
    s->device->ops->memory(s->device, &now, &held.device);
    held.host = fb_memory_resident();
    if (s->info.unified)
        held.host -= held.host > now ? now : held.host;
    return held;
}

fb_status fb_session_write_memory(const fb_session *s, const char *dir, fb_error *err)
{
    fb_session_memory held = fb_session_measure(s);
    char path[FB_PATH_SIZE], text[512];
    int n = snprintf(text, sizeof text, "{\n  \"device\": {\"planned\": %llu, \"measured\": %llu},\n"
                     "  \"host\": {\"planned\": %llu, \"measured\": %llu}\n}\n", (unsigned long long)s->plan.device_bytes,
                     (unsigned long long)held.device, (unsigned long long)s->plan.host_bytes, (unsigned long long)held.host);
    fb_status st = fb_path_join(path, sizeof path, dir, "memory.json", err);
    return st != FB_OK ? st : fb_file_write_atomic(path, text, (uint64_t)n, err);
}
