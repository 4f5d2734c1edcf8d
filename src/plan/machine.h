/* machine.h - what a machine can do: rates and sizes, measured by `forebay probe` or taken from data sheets.
 *
 * A profile is a JSON file of these fields (docs/FORMATS.md); shipped ones lie in profiles/.  Everything is in bytes,
 * seconds, FLOP: never in thousands or millions of them. */
#ifndef FB_PLAN_MACHINE_H
#define FB_PLAN_MACHINE_H

#include "base/error.h"

enum { FB_CURVE_MAX = 16 };

/* Rising x; between points linear in log x, beyond them the end's value. */
typedef struct fb_curve {
    uint32_t n;
    double   x[FB_CURVE_MAX], y[FB_CURVE_MAX];
} fb_curve;

double fb_curve_at(const fb_curve *c, double x); /* 0 of an empty curve */

typedef struct fb_machine {
    char     name[96];            /* "H200, 16 cores, 128 GiB" */
    char     device[96];          /* fb_device_info.name up to its first comma: "NVIDIA H200"; "cpu" */
    bool     measured;            /* false: from data sheets */
    bool     unified;             /* device memory is host memory */
    /* device */
    double   matmul_peak;         /* FLOP/s that a large product reaches, warm, in the compute dtype */
    fb_curve matmul_rows;         /* share of matmul_peak against the smallest of m, n, k (0..1) */
    double   matmul_accumulate;   /* share of the rate when the result is accumulated in fp32 (weight gradients), <= 1 */
    fb_curve attention_fwd;       /* FLOP/s (causal: half of the square counted) against document length, head_dim 128 */
    fb_curve attention_bwd;
    double   memory_rate;         /* bytes/s of device memory for row kernels */
    double   launch;              /* seconds a small kernel takes at least */
    uint64_t memory, overhead;    /* bytes of device memory; taken by context and libraries */
    double   peak_flops;          /* data sheet, dense, for MFU; 0: not known */
    /* link: bytes/s */
    fb_curve h2d, d2h;            /* against size of a copy, alone; latency included */
    double   h2d_both, d2h_both;  /* each direction while both run */
    double   copy_latency;        /* seconds a copy takes beside its bytes */
    /* host */
    double   dram;                /* bytes/s, stream triad, all cores */
    double   dram_dma;            /* bytes/s left to the cores while both directions of the link run */
    fb_curve update;              /* parameters/s of AdamW in split bf16 against threads */
    double   gather;              /* bytes/s of embedding rows gathered by the host */
    uint32_t cores;
    uint64_t ram;                 /* bytes a process may use */
    uint64_t pinnable;            /* bytes; 0: as ram */
    double   disk_write, disk_read; /* bytes/s of large files; 0: not known */
} fb_machine;

/* How a profile was measured; written beside the figures, not read back. */
typedef struct fb_machine_origin {
    const char *date;             /* "2025-01-31"; NULL: not said, like all here */
    const char *forebay;          /* version that measured */
    const char *backend;          /* "cuda" */
    const char *device;           /* the device's own name in full */
    double      spread;           /* largest (max - min) / median over the repetitions of a figure */
} fb_machine_origin;

/* FB_INPUT, with one sentence: not there, not JSON, a field missing, unknown, of the wrong kind or out of its range. */
fb_status fb_machine_read(fb_machine *out, const char *path, fb_error *err);
/* The same for text in memory; `where` names it in errors. */
fb_status fb_machine_parse(fb_machine *out, const char *text, size_t size, const char *where, fb_error *err);
/* JSON text, to be freed; origin may be NULL.  What is written reads back the same to the last bit; what would not be
 * read is refused (FB_INPUT). */
fb_status fb_machine_text(char **out, const fb_machine *m, const fb_machine_origin *origin, fb_error *err);
fb_status fb_machine_write(const fb_machine *m, const fb_machine_origin *origin, const char *path, fb_error *err);

/* name: a file's path (it has a '/' or ends in ".json"), or a shipped profile's name ("h200", "rtx4090"). */
fb_status fb_machine_find(fb_machine *out, const char *name, fb_error *err);
/* The shipped profile of the device with this name (fb_device_info.name); of several the one whose ram is nearest as a ratio,
 * or the first by name (ram 0).  FB_INPUT: none. */
fb_status fb_machine_for_device(fb_machine *out, const char *device, uint64_t ram, fb_error *err);

#endif
