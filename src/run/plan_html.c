#include "run/plan_html.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "io/file.h"

enum { WIDTH = 1000, ROW = 34, LEFT = 120, KEY = 190 };

static const char *const colours[FB_WORK_COUNT] = {
    [FB_WORK_FORWARD] = "#4c78a8", [FB_WORK_BACKWARD] = "#f58518", [FB_WORK_LOSS] = "#e45756", [FB_WORK_EMBED] = "#72b7b2",
    [FB_WORK_GRAD_OUT] = "#b279a2", [FB_WORK_DEVICE_UPDATE] = "#54a24b", [FB_WORK_WEIGHTS] = "#4c78a8", [FB_WORK_BATCH] = "#72b7b2",
    [FB_WORK_KEPT] = "#eeca3b", [FB_WORK_ACCUMULATOR] = "#9d755d", [FB_WORK_GRADIENT] = "#f58518",
    [FB_WORK_HOST_UPDATE] = "#54a24b", [FB_WORK_GATHER] = "#72b7b2",
};

static void put_text(FILE *f, const char *text)
{
    for (; *text; text++)
        if (*text == '<' || *text == '>' || *text == '&' || *text == '"')
            fprintf(f, "&#%d;", *text);
        else
            fputc(*text, f);
}

static void put_row(FILE *f, const char *name, const char *fmt, ...) FB_PRINTF(3, 4);

static void put_row(FILE *f, const char *name, const char *fmt, ...)
{
    char text[FB_WHY_SIZE];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    fputs("<tr><td>", f);
    put_text(f, name);
    fputs("</td><td>", f);
    put_text(f, text);
    fputs("</td></tr>\n", f);
}

static void put_ledger(FILE *f, const char *title, const fb_region *r, int n, uint64_t total, uint64_t budget)
{
    fprintf(f, "<table><caption>%s</caption>\n", title);
    for (int i = 0; i < n; i++)
        if (r[i].size)
            put_row(f, r[i].name, "%.1f MiB", (double)r[i].size / 0x1p20);
    put_row(f, "in all", "%.1f MiB", (double)total / 0x1p20);
    if (budget)
        put_row(f, "may take", "%.1f MiB", (double)budget / 0x1p20);
    fputs("</table>\n", f);
}

/* Neighbouring spans of one kind are one box. */
static void put_chart(FILE *f, const fb_timeline *t)
{
    double scale = WIDTH / t->seconds;
    int height = ROW * FB_RESOURCE_COUNT + 30;
    fprintf(f, "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"time line of a step\">\n", LEFT + WIDTH + 10, height);
    for (int who = 0; who < FB_RESOURCE_COUNT; who++) {
        fb_time_span open = { .begin = -1, .end = -1 };
        int top = who * ROW + 4, tall = ROW - 8;
        fprintf(f, "<text x=\"0\" y=\"%d\">%s</text>", top + 16, fb_resource_str((fb_resource)who));
        fprintf(f, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"#f0f0f0\"/>\n", LEFT, top, WIDTH, tall);
        for (uint32_t i = 0; i <= t->n_span; i++) {
            const fb_time_span *s = i < t->n_span ? &t->spans[i] : NULL;
            if (s && s->resource != (fb_resource)who)
                continue;
            if (s && open.end >= 0 && s->work == open.work && (s->begin - open.end) * scale < 0.5) {
                open.end = s->end;
                continue;
            }
            if (open.end > open.begin)
                fprintf(f, "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"%s\">"
                        "<title>%s, %.4f to %.4f s</title></rect>\n", LEFT + open.begin * scale, top,
                        (open.end - open.begin) * scale, tall, colours[open.work], fb_work_str(open.work), open.begin, open.end);
            if (s)
                open = *s;
        }
    }
    for (int i = 0; i <= 10; i++)
        fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%.3g s</text>\n", LEFT + WIDTH * i / 10, height - 6,
                t->seconds * i / 10);
    fputs("</svg>\n<p>", f);
    for (int w = 0; w < FB_WORK_COUNT; w++)
        fprintf(f, "<span class=\"key\"><i style=\"background:%s\"></i>%s</span>\n", colours[w], fb_work_str((fb_work)w));
    fputs("</p>\n", f);
}

static void put_page(FILE *f, const fb_outlook *o)
{
    const fb_timeline *t = &o->time;
    char layout[FB_LAYOUT_SIZE];
    fb_layout_describe(&o->plan, o->manifest, layout);
    fputs("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>forebay plan</title>\n<style>"
          "body{font:15px/1.5 system-ui,sans-serif;max-width:1130px;margin:2em auto;padding:0 1em;color:#222}"
          "table{border-collapse:collapse;display:inline-table;vertical-align:top;margin:0 2em 1.5em 0}"
          "caption{text-align:left;font-weight:600}td{padding:.1em .8em .1em 0;border-top:1px solid #ddd}"
          "td+td{text-align:right;font-variant-numeric:tabular-nums}svg{width:100%;height:auto;font:12px sans-serif}"
          ".key{margin-right:1.2em;white-space:nowrap}.key i{display:inline-block;width:.9em;height:.9em;margin-right:.3em}"
          "</style></head><body>\n<h1>", f);
    put_text(f, o->model);
    fputs("</h1>\n<p>", f);
    put_text(f, layout);
    fputs(".</p>\n", f);
    if (!o->fits) {
        fputs("<p><strong>It does not fit.</strong> ", f);
        put_text(f, o->reason.msg);
        fputs("</p>\n", f);
    } else {
        fprintf(f, "<h2>A step: %.3f s, %.0f tokens/s, %.4g TFLOPS</h2>\n<p>", t->seconds, o->tokens / t->seconds,
                1e-12 * o->flops / t->seconds);
        put_text(f, o->machine_note);
        fputs(". ", f);
        put_text(f, o->why);
        fputs(".</p>\n", f);
        put_chart(f, t);
        fputs("<table><caption>why compute stands still</caption>\n", f);
        for (int i = 0; i < FB_CAUSE_COUNT; i++)
            put_row(f, fb_cause_str((fb_cause)i), "%.2f %%", 100 * t->idle[i] / t->seconds);
        fputs("</table>\n", f);
    }
    fputs("<h2>Memory</h2>\n", f);
    put_ledger(f, "device", o->plan.device, FB_DEV_COUNT, o->plan.device_bytes, o->request.hbm_budget);
    put_ledger(f, "host", o->plan.host, FB_HOST_COUNT, o->plan.host_bytes, o->request.ram_budget);
    fputs("<h2>What else would fit, and what to buy</h2>\n<table><caption>largest, all else the same</caption>\n", f);
    put_row(f, "rows a step", "%s%u", o->rows_open ? "over " : "", o->rows_max);
    put_row(f, "cutoff_len", "%s%u", o->row_len_open ? "over " : "", o->row_len_max);
    put_row(f, "layers of this shape", "%s%u", o->layers_open ? "over " : "", o->layers_max);
    fputs("</table>\n<table><caption>a step with</caption>\n", f);
    for (int i = 0; i < FB_N_ALTERNATIVE; i++)
        if (o->more[i].seconds > 0)
            put_row(f, o->more[i].what, "%.3f s", o->more[i].seconds);
        else
            put_row(f, o->more[i].what, "does not fit either");
    fputs("</table>\n</body></html>\n", f);
}

fb_status fb_plan_html(const fb_outlook *o, const char *path, fb_error *err)
{
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    if (!f)
        return fb_fail(err, FB_NOMEM, "%s: no memory for the page", path);
    put_page(f, o);
    fb_status st = fclose(f) == 0 ? FB_OK : fb_fail(err, FB_NOMEM, "%s: no memory for the page", path);
    if (st == FB_OK)
        st = fb_file_write_atomic(path, text, size, err);
    free(text);
    return st;
}
