#include "run/outlook.h"

/* ---- what else would fit ---- */

enum { ROWS_MOST = 1 << 17, LAYERS_MOST = 512, TOKENS_STEP = 64, TOKEN_STEPS_MOST = 1 << 16 };

static bool rows_fit(const fb_outlook *o, uint32_t n)
{
    fb_wishes w = o->wishes;
    w.load.rows_per_step = n;
    return fb_plan_can_fit(&o->request, &o->machine, &w);
}

static bool row_len_fits(const fb_outlook *o, uint32_t n)
{
    fb_plan_request r = o->request;
    r.row_len = n * TOKENS_STEP;
    return fb_plan_can_fit(&r, &o->machine, &o->wishes);
}

static bool layers_fit(const fb_outlook *o, uint32_t n)
{
    fb_error unused;
    fb_model_config c;
    fb_manifest m = { 0 };
    if (fb_model_config_parse(&c, o->manifest->cfg.json, o->model, &unused) != FB_OK)
        return false;
    c.n_layer = n;
    fb_plan_request r = o->request;
    r.manifest = &m;
    fb_wishes w = o->wishes;
    if (w.home_layers > n)
        w.home_layers = n;
    bool fits = fb_manifest_build(&m, &c, &unused) == FB_OK && fb_plan_can_fit(&r, &o->machine, &w);
    fb_manifest_free(&m);
    return fits;
}

/* The largest n up to most that fits, a larger one needing more; 0: none.  open: it is the most that was tried. */
static uint32_t largest(const fb_outlook *o, bool (*fits)(const fb_outlook *o, uint32_t n), uint32_t from, uint32_t most,
                        bool *open)
{
    uint32_t low = 0, high = most + 1; /* low fits (or is 0), high does not */
    for (uint32_t n = from < 1 ? 1 : from; n <= most && high > most; n = n > most / 2 ? n + 1 : 2 * n) {
        if (fits(o, n))
            low = n;
        else
            high = n;
        if (n > most / 2 && high > most) { /* one look at the end instead of many */
            if (fits(o, most))
                low = most;
            break;
        }
    }
    while (low < most && high - low > 1) {
        uint32_t n = low + (high - low) / 2;
        if (fits(o, n))
            low = n;
        else
            high = n;
    }
    *open = low == most;
    return low;
}

/* ---- what to buy ---- */

static double seconds_with(const fb_plan_request *asked, const fb_machine *m, const fb_wishes *w)
{
    fb_plan p;
    fb_timeline t = { 0 };
    fb_error unused;
    fb_plan_request r = *asked;
    return fb_plan_search(&p, &t, &r, m, w, NULL, &unused) == FB_OK ? t.seconds : 0;
}

static void faster_link(fb_machine *m, double factor)
{
    for (uint32_t i = 0; i < m->h2d.n; i++)
        m->h2d.y[i] *= factor;
    for (uint32_t i = 0; i < m->d2h.n; i++)
        m->d2h.y[i] *= factor;
    m->h2d_both *= factor;
    m->d2h_both *= factor;
}

static void look_at_more(fb_outlook *o, const fb_plan_request *asked)
{
    static const uint64_t gib = UINT64_C(1) << 30;
    fb_plan_request r = *asked;
    o->wishes.known = o->plan.layout;
    o->wishes.known_rows = o->fits ? o->request.micro_rows : 0;
    r.hbm_budget += r.hbm_budget ? gib : 0;
    o->more[0] = (fb_alternative){ "1 GiB more of device memory", seconds_with(&r, &o->machine, &o->wishes) };
    r = *asked;
    r.ram_budget += r.ram_budget ? gib : 0;
    o->more[1] = (fb_alternative){ "1 GiB more of host memory", seconds_with(&r, &o->machine, &o->wishes) };
    fb_machine m = o->machine;
    faster_link(&m, 1.5);
    o->more[2] = (fb_alternative){ "a link 1.5 times as fast", seconds_with(asked, &m, &o->wishes) };
}

fb_status fb_outlook_make(fb_outlook *o, fb_error *err)
{
    fb_plan_request asked = o->request;
    o->time = (fb_timeline){ .spans = o->spans, .n_span_max = FB_TIMELINE_SPANS };
    fb_status st = fb_planning_search(&o->plan, &o->time, &o->request, &o->machine, &o->wishes, o->options,
                                      o->options->save_strategy != FB_SAVE_NO, &o->reason);
    if (st != FB_OK && st != FB_NOFIT)
        return fb_fail(err, st, "%s", o->reason.msg);
    o->fits = st == FB_OK;
    asked.save_bytes = o->request.save_bytes;
    o->tokens = (double)o->wishes.load.rows_per_step * asked.row_len;
    o->flops = 6 * (double)o->manifest->n_weight * o->tokens;
    fb_timeline_explain(o->why, sizeof o->why, &o->time);
    o->rows_max = largest(o, rows_fit, o->wishes.load.rows_per_step, ROWS_MOST, &o->rows_open);
    o->row_len_max = TOKENS_STEP * largest(o, row_len_fits, asked.row_len / TOKENS_STEP, TOKEN_STEPS_MOST, &o->row_len_open);
    o->layers_max = largest(o, layers_fit, o->manifest->cfg.n_layer, LAYERS_MOST, &o->layers_open);
    look_at_more(o, &asked);
    return FB_OK;
}
