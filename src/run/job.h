/* job.h - what a job holds between its calls. */
#ifndef FB_RUN_JOB_H
#define FB_RUN_JOB_H

#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>

#include "config/options.h"

struct fb_job {
    fb_options options;
    fb_sink    sink;   /* ours: passes on to `outlet`, one caller at a time */
    fb_sink    outlet; /* the caller's */
    pthread_mutex_t say_lock;
    volatile sig_atomic_t stop; /* asked for */
    atomic_int report; /* the same; from a signal handler too: it is lock-free */
    sem_t      wake;   /* posted by fb_job_report: the watchdog need not be waited for */
};

#endif
