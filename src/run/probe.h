/* probe.h - the parts of `forebay probe`: each measures some fields of a machine's profile.
 *
 * Everything on the device goes through its ops and kernels, timed by its own events, so that one code serves every back
 * end.  A figure is the median of several repetitions, each long enough for the clock; how far these lay apart is kept.
 * Sizes follow from the time things take, so that neither a GPU nor two cores are kept busy for long. */
#ifndef FB_RUN_PROBE_H
#define FB_RUN_PROBE_H

#include "device/kernels.h"
#include "plan/machine.h"
#include "run/host_rate.h"

typedef struct fb_prober {
    fb_device      *d;
    fb_device_info  info;
    fb_dtype        act;
    fb_event       *since, *until;
    unsigned char  *pinned;      /* random numbers of dtype act: zeros would cost a GPU less power, and raise its clock */
    uint64_t        pinned_size;
    void           *notes;       /* FB_PROBE_NOTES_SIZE bytes, pinned too, to send small things from */
    fb_team        *team;        /* of the host, all cores */
    fb_host_arrays  arrays;
    fb_task         triad;       /* the faster one here; after fb_probe_host */
    fb_machine      m;           /* what was found */
    double          spread;      /* the largest (max - min) / median so far */
    const fb_sink  *sink;
} fb_prober;

enum { FB_PROBE_RUNS = 5, FB_PROBE_NOTES_SIZE = 4096 };

/* The median of n samples (reordered); notes their spread. */
double fb_prober_median(fb_prober *p, double *samples, int n);
/* Device memory full of random numbers of dtype act. */
fb_status fb_prober_alloc(fb_prober *p, uint64_t size, void **out, fb_error *err);
/* Waits for whatever still runs, which after a failure may be a lot: then memory and events may go. */
void      fb_prober_settle(fb_prober *p);

fb_status fb_probe_products(fb_prober *p, fb_error *err);  /* matmul_* */
fb_status fb_probe_attention(fb_prober *p, fb_error *err); /* attention_*; after the products */
fb_status fb_probe_rows(fb_prober *p, fb_error *err);      /* memory_rate, launch */
fb_status fb_probe_link(fb_prober *p, fb_error *err);      /* h2d, d2h, *_both, copy_latency; dram_dma, after the host */
fb_status fb_probe_host(fb_prober *p, fb_error *err);      /* dram, update, gather */
fb_status fb_probe_disk(fb_prober *p, const char *dir, fb_error *err); /* disk_* */

#endif
