/* outlook.h - what `forebay plan` has to say, as figures: the plan, the step foreseen, what else would fit, what to buy. */
#ifndef FB_RUN_OUTLOOK_H
#define FB_RUN_OUTLOOK_H

#include "run/planning.h"

typedef struct fb_alternative {
    const char *what;
    double      seconds; /* of a step; 0: it does not fit either */
} fb_alternative;

enum { FB_N_ALTERNATIVE = 3, FB_WHY_SIZE = 320 };

typedef struct fb_outlook {
    /* in */
    const char        *model;
    const fb_manifest *manifest;
    fb_machine         machine;
    char               machine_note[FB_MACHINE_NOTE_SIZE];
    fb_plan_request    request;      /* out: micro_rows, n_micro as chosen */
    fb_wishes          wishes;
    const fb_options  *options;      /* of checkpoints */
    fb_dtype           save_dtype;
    /* out */
    fb_plan            plan;
    fb_timeline        time;
    fb_time_span       spans[FB_TIMELINE_SPANS];
    bool               fits;
    fb_error           reason;       /* if not */
    double             tokens, flops; /* of a step; 6 a parameter and token */
    char               why[FB_WHY_SIZE]; /* what bounds it */
    uint32_t           rows_max, row_len_max, layers_max; /* that fit, all else the same; 0: none */
    bool               rows_open, row_len_open, layers_open; /* more were not tried */
    fb_alternative     more[FB_N_ALTERNATIVE];
} fb_outlook;

/* Any failure but FB_NOFIT, which is in the result. */
fb_status fb_outlook_make(fb_outlook *o, fb_error *err);

#endif
