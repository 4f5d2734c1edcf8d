/* job.h - what a job holds between its calls. */
#ifndef FB_RUN_JOB_H
#define FB_RUN_JOB_H

#include <signal.h>

#include "config/options.h"

struct fb_job {
    fb_options options;
    fb_sink    sink;
    volatile sig_atomic_t stop;
};

#endif
