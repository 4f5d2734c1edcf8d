/* plan_report.c - `forebay plan`: what a run would take, before anything is allocated, here or on a machine that is elsewhere. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/parse.h"
#include "run/checkpoint_write.h"
#include "run/dataset.h"
#include "run/job.h"
#include "run/plan_html.h"
#include "run/preset.h"
#include "run/session.h"
#include "run/sink.h"

static const char *const policies[] = { "none", "selective", "full" };

/* ---- as JSON ---- */

static json_t *ledger(const fb_region *r, int n)
{
    json_t *o = json_object();
    for (int i = 0; i < n; i++)
        if (r[i].size)
            json_object_set_new(o, r[i].name, json_integer((json_int_t)r[i].size));
    return o;
}

/* ---- checkpoints ---- */

static const double DISK_RATE = 1e9; /* bytes a second, where the machine's profile has none */

static double disk_rate(const fb_outlook *o)
{
    return o->machine.disk_write > 0 ? o->machine.disk_write : DISK_RATE;
}

/* Seconds that training waits for the disk: a save has the next step's time and the buffer before an update must wait. */
static double save_wait(const fb_outlook *o)
{
    double bytes = (double)fb_checkpoint_size(o->manifest, o->save_dtype);
    double wait = (bytes - (double)o->plan.host[FB_HOST_SAVE_BUFFER].size) / disk_rate(o) - o->time.seconds;
    return wait > 0 ? wait : 0;
}

static json_t *layout_json(const fb_outlook *o)
{
    const fb_layout *l = &o->plan.layout;
    return json_pack("{s:i, s:i, s:i, s:i, s:i, s:b, s:b, s:s, s:s, s:i, s:s, s:s}", "micro_batch", (int)o->request.micro_rows,
        "micro_batches", (int)o->request.n_micro, "passes", (int)l->n_pass, "slots", (int)l->slots, "home_layers",
        (int)l->home_layers,
        "home_embedding", l->home_embed, "home_head", l->home_head, "recompute", policies[l->recompute], "recompute_last",
        policies[l->rich], "recompute_last_layers", (int)l->n_rich, "activations", l->kept_on_host ? "host" : "device",
        "accumulators", l->acc_on_device ? "device" : "host");
}

static json_t *prediction_json(const fb_outlook *o)
{
    const fb_timeline *t = &o->time;
    json_t *busy = json_object(), *idle = json_object(), *spans = json_array();
    for (int i = 0; i < FB_RESOURCE_COUNT; i++)
        json_object_set_new(busy, fb_resource_str((fb_resource)i), fb_json_real(t->busy[i]));
    for (int i = 0; i < FB_CAUSE_COUNT; i++)
        json_object_set_new(idle, fb_cause_str((fb_cause)i), fb_json_real(t->idle[i]));
    for (uint32_t i = 0; i < t->n_span; i++) {
        const fb_time_span *s = &t->spans[i];
        json_array_append_new(spans, json_pack("{s:s, s:s, s:i, s:f, s:f}", "resource", fb_resource_str(s->resource), "work",
            fb_work_str(s->work), "block", (int)s->block, "begin", s->begin, "end", s->end));
    }
    return json_pack("{s:f, s:f, s:f, s:o, s:o, s:I, s:I, s:s, s:o, s:i}", "step_seconds", t->seconds, "tokens_per_second",
        o->tokens / t->seconds, "tflops", 1e-12 * o->flops / t->seconds, "busy", busy, "idle", idle, "h2d_bytes",
        (json_int_t)t->h2d_size,
        "d2h_bytes", (json_int_t)t->d2h_size, "bound", o->why, "timeline", spans, "timeline_lost", (int)t->n_lost);
}

static fb_status report_json(const fb_outlook *o, const fb_sink *sink, fb_error *err)
{
    const fb_plan *p = &o->plan;
    json_t *more = json_array();
    for (int i = 0; i < FB_N_ALTERNATIVE; i++)
        json_array_append_new(more, json_pack("{s:s, s:o}", "what", o->more[i].what, "step_seconds",
                                              o->more[i].seconds > 0 ? json_real(o->more[i].seconds) : json_null()));
    json_t *machine = json_pack("{s:s, s:b, s:s}", "name", o->machine.name, "measured", o->machine.measured, "note",
                                o->machine_note);
    json_t *most = json_pack("{s:i, s:i, s:i}", "rows_per_step", (int)o->rows_max, "cutoff_len", (int)o->row_len_max, "layers",
                             (int)o->layers_max);
    json_t *root = json_pack("{s:b, s:s*, s:I, s:I, s:f, s:o, s:o, s:i, s:i, s:i, s:o, s:o, s:o, s:o, s:o, s:I, s:f}",
        "fits", o->fits, "reason", o->fits ? NULL : o->reason.msg, "host_bytes", (json_int_t)p->host_bytes,
        "device_bytes", (json_int_t)p->device_bytes,
        "step_seconds", o->time.seconds, "host", ledger(p->host, FB_HOST_COUNT), "device", ledger(p->device, FB_DEV_COUNT),
        "slots", (int)p->layout.slots, "passes", (int)p->layout.n_pass, "micro_batches_per_pass", (int)p->micro_per_pass,
        "layout", layout_json(o), "machine", machine, "prediction", prediction_json(o), "largest", most, "more", more,
        "checkpoint_bytes", (json_int_t)fb_checkpoint_size(o->manifest, o->save_dtype), "save_wait_seconds", save_wait(o));
    return fb_say_json(sink, root, err);
}

/* ---- as text ---- */

static void report_side(const char *title, const fb_region *r, int n, uint64_t total, uint64_t budget, const fb_sink *sink)
{
    fb_say(sink, FB_SAY_RESULT, "%s", title);
    for (int i = 0; i < n; i++)
        if (r[i].size)
            fb_say(sink, FB_SAY_RESULT, "  %-36s %12.1f MiB", r[i].name, (double)r[i].size / 0x1p20);
    if (budget)
        fb_say(sink, FB_SAY_RESULT, "  %-36s %12.1f MiB of %.1f", "in all", (double)total / 0x1p20, (double)budget / 0x1p20);
    else
        fb_say(sink, FB_SAY_RESULT, "  %-36s %12.1f MiB", "in all", (double)total / 0x1p20);
}

enum { COLUMNS = 80 };

/* What a resource does in each column: the work that fills most of it; a dot for nothing. */
static void draw(char bar[COLUMNS + 1], const fb_timeline *t, fb_resource who)
{
#define LETTER(name, text) [FB_WORK_##name] = #name,
    static const char *const names[] = { FB_WORK_MAP(LETTER) };
    double share[COLUMNS][FB_WORK_COUNT] = { { 0 } }, column = t->seconds / COLUMNS;
    for (uint32_t i = 0; i < t->n_span; i++) {
        const fb_time_span *s = &t->spans[i];
        for (int k = (int)(s->begin / column); s->resource == who && k < COLUMNS && k * column < s->end; k++) {
            double from = s->begin > k * column ? s->begin : k * column, to = s->end < (k + 1) * column ? s->end : (k + 1) * column;
            share[k][s->work] += to > from ? to - from : 0;
        }
    }
    for (int k = 0; k < COLUMNS; k++) {
        int most = 0;
        double sum = 0;
        for (int w = 0; w < FB_WORK_COUNT; w++) {
            sum += share[k][w];
            most = share[k][w] > share[k][most] ? w : most;
        }
        bar[k] = sum < 0.05 * column ? '.' : names[most][0];
        if (bar[k] != '.' && sum < 0.6 * column)
            bar[k] = (char)(bar[k] - 'A' + 'a'); /* partly idle */
    }
    bar[COLUMNS] = 0;
}

static void report_time(const fb_outlook *o, const fb_sink *sink)
{
    const fb_timeline *t = &o->time;
    fb_say(sink, FB_SAY_RESULT, "step  %.3f s foreseen, %.0f tokens/s, %.4g TFLOPS; %s", t->seconds, o->tokens / t->seconds,
           1e-12 * o->flops / t->seconds, o->machine_note);
    for (int i = 0; i < FB_RESOURCE_COUNT; i++) {
        char bar[COLUMNS + 1];
        draw(bar, t, (fb_resource)i);
        if (t->busy[i] > 0)
            fb_say(sink, FB_SAY_RESULT, "  %-15s %s %5.1f%%", fb_resource_str((fb_resource)i), bar, 100 * t->busy[i] / t->seconds);
    }
    fb_say(sink, FB_SAY_RESULT, "  (Forward, Backward, Loss, Embedding, Grad out, Device update; Weights, Batch, Kept, "
           "Accumulators, Gradients; Host update; small: partly idle)");
    fb_say(sink, FB_SAY_RESULT, "  %s", o->why);
}

static void report_text(const fb_outlook *o, const fb_sink *sink)
{
    const fb_manifest *m = o->manifest;
    const fb_plan *p = &o->plan;
    char layout[FB_LAYOUT_SIZE];
    uint64_t state = 0;
    for (int i = FB_HOST_WEIGHTS; i <= FB_HOST_GRADIENTS; i++)
        state += p->host[i].size;
    fb_say(sink, FB_SAY_RESULT, "%s: %.1f M parameters in %u layers, %s; %.1f bytes a parameter in host memory",
           m->cfg.arch->hf_name,
           (double)m->n_weight / 1e6, m->cfg.n_layer, fb_dtype_hf_str(o->request.act), (double)state / (double)m->n_weight);
    fb_layout_describe(p, m, layout);
    fb_say(sink, FB_SAY_RESULT, "%u micro-batches of %u rows of %u tokens; %s; clipping %s", o->request.n_micro,
           o->request.micro_rows, o->request.row_len, layout, o->request.clip ? "exact" : "off");
    report_side("device", p->device, FB_DEV_COUNT, p->device_bytes, o->request.hbm_budget, sink);
    report_side("host", p->host, FB_HOST_COUNT, p->host_bytes, o->request.ram_budget, sink);
    if (o->options->save_strategy != FB_SAVE_NO) {
        double bytes = (double)fb_checkpoint_size(m, o->save_dtype);
        fb_say(sink, FB_SAY_RESULT,
               "a checkpoint has %.1f MiB: at %.3g GB/s %.1f s in the background, of which training waits about %.1f s",
               bytes / 0x1p20, 1e-9 * disk_rate(o), bytes / disk_rate(o), save_wait(o));
    }
    if (o->fits)
        report_time(o, sink);
    fb_say(sink, FB_SAY_RESULT, "largest, all else the same: %s%u rows a step, cutoff_len %s%u, %s%u layers of this shape",
           o->rows_open ? "over " : "", o->rows_max, o->row_len_open ? "over " : "", o->row_len_max, o->layers_open ? "over " : "",
           o->layers_max);
    for (int i = 0; i < FB_N_ALTERNATIVE; i++) {
        const fb_alternative *a = &o->more[i];
        if (a->seconds > 0 && o->fits)
            fb_say(sink, FB_SAY_RESULT, "with %s: %.3f s a step (%+.1f%%)", a->what, a->seconds,
                   100 * (a->seconds / o->time.seconds - 1));
        else if (a->seconds > 0)
            fb_say(sink, FB_SAY_RESULT, "with %s it would fit: %.3f s a step", a->what, a->seconds);
    }
}

/* ---- the question ---- */

static fb_status read_size(uint64_t *out, const char *text, const char *word, fb_error *err)
{
    *out = 0;
    if (text && (!fb_parse_size(text, out) || !*out))
        return fb_fail(err, FB_CONFIG, "plan: %s wants a size like 24GiB or 1.5TiB, not '%s'", word, text);
    return FB_OK;
}

static fb_status set_link(fb_machine *m, const char *text, fb_error *err)
{
    double rate;
    if (!text)
        return FB_OK;
    if (!fb_parse_real(text, &rate) || rate <= 0 || rate > 1e5)
        return fb_fail(err, FB_CONFIG, "plan: --link wants GB/s in either direction, above 0, not '%s'", text);
    double share = m->h2d.n && m->h2d.y[m->h2d.n - 1] > 0 ? 1e9 * rate / m->h2d.y[m->h2d.n - 1] : 1;
    for (uint32_t i = 0; i < m->h2d.n; i++)
        m->h2d.y[i] *= share;
    for (uint32_t i = 0; i < m->d2h.n; i++)
        m->d2h.y[i] *= share;
    m->h2d_both *= share;
    m->d2h_both *= share;
    return FB_OK;
}

static fb_status open_model(fb_session *s, const fb_options *o, const char *preset, fb_error *err)
{
    static const char *const needed[] = { "model_name_or_path" };
    char config[FB_PRESET_SIZE];
    fb_status st = FB_OK;
    if (!preset) {
        FB_TRY(fb_options_require(o, needed, FB_COUNT(needed), err));
        return fb_session_open(s, o->model_name_or_path, err);
    }
    FB_TRY(fb_preset_config(config, preset, err));
    FB_TRY(fb_session_open_shape(s, config, preset, err));
done:
    return st;
}

static fb_status report(const fb_outlook *o, const fb_plan_view *v, const fb_sink *sink, fb_error *err)
{
    fb_status st = FB_OK;
    if (v->html)
        FB_TRY(fb_plan_html(o, v->html, err));
    if (v->json)
        FB_TRY(report_json(o, sink, err));
    else
        report_text(o, sink);
done:
    return st;
}

fb_status fb_plan_report(fb_job *j, const fb_plan_view *v, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_options *o = &j->options;
    fb_dataset data = { 0 };
    fb_session s = { 0 };
    fb_session_request r = { .options = o, .train = true, .row_len = o->cutoff_len };
    uint32_t rows;
    uint64_t hbm, ram;
    fb_outlook *out = calloc(1, sizeof *out);
    if (!out)
        return fb_fail(err, FB_NOMEM, "plan: no memory");
    FB_TRY(read_size(&hbm, v->hbm, "--hbm", err));
    FB_TRY(read_size(&ram, v->ram, "--ram", err));
    FB_TRY(open_model(&s, o, v->preset, err));
    fb_session_batch(o, &rows, &r.micro_rows, &r.n_micro);
    if (o->dataset && o->output_dir && !v->preset) { /* what train will see; without data, rows are taken to be full */
        FB_TRY(fb_dataset_open(&data, o, &s.manifest.cfg, &j->stop, &j->sink, err));
        r.row_len = fb_dataset_row_len(&data, o);
    }
    if (v->machine) {
        FB_TRY(fb_machine_find(&out->machine, v->machine, err));
        snprintf(out->machine_note, sizeof out->machine_note, "rates of %s, %s", out->machine.name,
                 out->machine.measured ? "measured" : "from data sheets");
        out->request = fb_planning_absent(o, &s.manifest, &out->machine, hbm, ram);
        out->request.row_len = r.row_len, out->request.micro_rows = r.micro_rows, out->request.n_micro = r.n_micro;
    } else {
        FB_TRY(fb_session_ask(&s, &r, &out->request, err));
        fb_planning_machine(&out->machine, out->machine_note, &s.info);
        if (hbm)
            out->request.hbm_budget = hbm > s.info.memory_overhead ? hbm - s.info.memory_overhead : 1;
        if (ram)
            out->request.ram_budget = ram, out->request.ram_limit = NULL;
    }
    FB_TRY(set_link(&out->machine, v->link, err));
    FB_TRY(fb_planning_wishes(&out->wishes, o, &s.manifest, out->request.unified, rows, err));
    out->manifest = &s.manifest;
    out->model = v->preset ? v->preset : o->model_name_or_path;
    out->options = o;
    out->save_dtype = o->save_dtype == FB_DTYPE_AUTO ? s.manifest.cfg.dtype : (fb_dtype)o->save_dtype;
    FB_TRY(fb_outlook_make(out, err));
    FB_TRY(report(out, v, &j->sink, err));
    if (!out->fits)
        st = fb_fail(err, FB_NOFIT, "%s", out->reason.msg);
done:
    fb_session_close(&s);
    fb_dataset_close(&data);
    free(out);
    return st;
}
