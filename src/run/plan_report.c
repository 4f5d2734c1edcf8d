/* plan_report.c - `forebay plan`: the byte ledger of a config, before anything is allocated. */
#include "base/clock.h"
#include "run/checkpoint_write.h"
#include "run/dataset.h"
#include "run/job.h"
#include "run/session.h"
#include "run/sink.h"

/* ---- how fast this machine multiplies: a short look, so that the step's time is of the right order ---- */

enum { LOOK_SIZE = 768, LOOK_RUNS = 6 };

/* Floating-point operations a second, the best of a few matrix products; the first warms up. */
static fb_status look_at_rate(double *rate, const fb_options *o, fb_error *err)
{
    fb_status st = FB_OK;
    fb_device *d;
    void *mem;
    const uint64_t n = LOOK_SIZE;
    *rate = 0;
    st = fb_device_open(&d, &(fb_device_options){ .backend = o->backend, .index = o->device, .n_thread = o->compute_threads }, err);
    if (st != FB_OK)
        return st;
    FB_TRY(d->ops->alloc(d, 3 * n * n * sizeof(float), &mem, err));
    float *x = mem;
    FB_TRY(d->ops->fill_zero(d, FB_STREAM_COMPUTE, mem, 3 * n * n * sizeof(float), err));
    for (int i = 0; i < LOOK_RUNS; i++) {
        FB_TRY(d->ops->sync(d, FB_STREAM_COMPUTE, err));
        double before = fb_clock();
        FB_TRY(d->kernels->matmul_nt(d, &(fb_matmul_nt){ .act = FB_F32, .y_dtype = FB_F32, .m = LOOK_SIZE, .n = LOOK_SIZE,
            .k = LOOK_SIZE, .x = x, .x_ld = n, .w = x + n * n, .w_ld = n, .y = x + 2 * n * n, .y_ld = n }, err));
        FB_TRY(d->ops->sync(d, FB_STREAM_COMPUTE, err));
        double seen = 2.0 * (double)(n * n * n) / (fb_clock() - before);
        *rate = i && seen > *rate ? seen : *rate;
    }
done:
    d->ops->close(d);
    return st;
}

/* ---- the report ---- */

static json_t *ledger(const fb_region *r, int n)
{
    json_t *o = json_object();
    for (int i = 0; i < n; i++)
        if (r[i].size)
            json_object_set_new(o, r[i].name, json_integer((json_int_t)r[i].size));
    return o;
}

/* ---- checkpoints ---- */

static const double DISK_RATE = 1e9; /* bytes a second; nothing is measured */

static fb_dtype saved_dtype(const fb_session *s, const fb_options *o)
{
    return o->save_dtype == FB_DTYPE_AUTO ? s->manifest.cfg.dtype : (fb_dtype)o->save_dtype;
}

/* Seconds that training waits for the disk: a save has the next step's time and the buffer before an update must wait. */
static double save_wait(const fb_session *s, const fb_options *o, double step_seconds)
{
    double bytes = (double)fb_checkpoint_size(&s->manifest, saved_dtype(s, o));
    double buffer = (double)s->plan.host[FB_HOST_SAVE_BUFFER].size;
    double wait = (bytes - buffer) / DISK_RATE - step_seconds;
    return wait > 0 ? wait : 0;
}

static fb_status report_json(const fb_session *s, double step_seconds, const fb_options *o, const fb_error *short_of,
                             const fb_sink *sink, fb_error *err)
{
    const fb_plan *p = &s->plan;
    json_t *root = json_pack("{s:b, s:s*, s:I, s:I, s:f, s:o, s:o, s:i, s:i, s:i, s:I, s:f}", "fits", short_of == NULL,
        "reason", short_of ? short_of->msg : NULL, "host_bytes", (json_int_t)p->host_bytes, "device_bytes",
        (json_int_t)p->device_bytes, "step_seconds", step_seconds, "host", ledger(p->host, FB_HOST_COUNT), "device", ledger(p->device, FB_DEV_COUNT),
        "slots", (int)p->slots, "passes", (int)p->n_pass, "micro_batches_per_pass", (int)p->micro_per_pass,
        "checkpoint_bytes", (json_int_t)fb_checkpoint_size(&s->manifest, saved_dtype(s, o)), "save_wait_seconds",
        save_wait(s, o, step_seconds));
    return fb_say_json(sink, root, err);
}

static void report_side(const char *title, const fb_region *r, int n, uint64_t total, const fb_sink *sink)
{
    fb_say(sink, FB_SAY_RESULT, "%s", title);
    for (int i = 0; i < n; i++)
        if (r[i].size)
            fb_say(sink, FB_SAY_RESULT, "  %-32s %12.1f MiB", r[i].name, (double)r[i].size / 0x1p20);
    fb_say(sink, FB_SAY_RESULT, "  %-32s %12.1f MiB", "in all", (double)total / 0x1p20);
}

static void report_text(const fb_session *s, double step_seconds, const fb_options *o, const fb_sink *sink)
{
    const fb_manifest *m = &s->manifest;
    const fb_plan *p = &s->plan;
    fb_say(sink, FB_SAY_RESULT, "%s: %.1f M parameters in %u layers, %s; %.1f bytes a parameter in host memory", m->cfg.arch->hf_name,
           (double)m->n_weight / 1e6, m->cfg.n_layer, fb_dtype_hf_str(s->act),
           (double)(p->host[FB_HOST_WEIGHTS].size + p->host[FB_HOST_REMAINDERS].size + p->host[FB_HOST_M].size
                    + p->host[FB_HOST_V].size + p->host[FB_HOST_GRADIENTS].size) / (double)m->n_weight);
    fb_say(sink, FB_SAY_RESULT, "%u of %u layers have a slot; %u micro-batches of at most %u tokens in %u pass%s a step; clipping %s",
           p->slots, m->cfg.n_layer, p->micro_per_pass * p->n_pass, p->t_max, p->n_pass, p->n_pass > 1 ? "es" : "",
           o->max_grad_norm > 0 ? "exact" : "off");
    fb_say(sink, FB_SAY_RESULT, "about %.2g s a step, by the products alone, at the rate of a short look at this machine", step_seconds);
    report_side("device", p->device, FB_DEV_COUNT, p->device_bytes, sink);
    report_side("host", p->host, FB_HOST_COUNT, p->host_bytes, sink);
    double bytes = (double)fb_checkpoint_size(&s->manifest, saved_dtype(s, o));
    fb_say(sink, FB_SAY_RESULT, "a checkpoint has %.1f MiB: at 1 GB/s %.1f s in the background, of which training waits "
           "about %.1f s", bytes / 0x1p20, bytes / DISK_RATE, save_wait(s, o, step_seconds));
}

fb_status fb_plan_report(fb_job *j, bool json, fb_error *err)
{
    static const char *const needed[] = { "model_name_or_path" };
    fb_status st = FB_OK;
    fb_error short_of;
    const fb_options *o = &j->options;
    double rate;
    fb_dataset data = { 0 };
    fb_session s = { 0 };
    fb_session_request r = { .options = o, .train = true, .saves = o->save_strategy != FB_SAVE_NO, .row_len = o->cutoff_len };
    uint32_t rows_per_step;
    FB_TRY(fb_options_require(o, needed, FB_COUNT(needed), err));
    FB_TRY(fb_session_open(&s, o->model_name_or_path, err));
    fb_session_batch(o, &rows_per_step, &r.micro_rows, &r.n_micro);
    if (o->dataset && o->output_dir) { /* what train will see; without data, rows are taken to be full */
        FB_TRY(fb_dataset_open(&data, o, &s.manifest.cfg, &j->sink, err));
        r.row_len = fb_dataset_row_len(&data, o);
    }
    FB_TRY(look_at_rate(&rate, o, err));
    st = fb_session_plan(&s, &r, &short_of);
    if (st != FB_OK && st != FB_NOFIT)
        FB_TRY(fb_fail(err, st, "%s", short_of.msg));
    bool fits = st == FB_OK;
    if (json)
        FB_TRY(report_json(&s, s.step_flops / rate, o, fits ? NULL : &short_of, &j->sink, err));
    else
        report_text(&s, s.step_flops / rate, o, &j->sink);
    st = fits ? FB_OK : fb_fail(err, FB_NOFIT, "%s", short_of.msg);
done:
    fb_session_close(&s);
    fb_dataset_close(&data);
    return st;
}
