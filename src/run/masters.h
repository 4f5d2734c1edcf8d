/* masters.h - the master weights of a folder: exact where it is a checkpoint of ours, else the weights that it has. */
#ifndef FB_RUN_MASTERS_H
#define FB_RUN_MASTERS_H

#include "model/manifest.h"

typedef struct fb_masters {
    fb_shard_set *weights;
    fb_shard     *exact;   /* remainders.safetensors or masters.safetensors; NULL: neither is there */
} fb_masters;

/* Everything the manifest names is there, with its shape.  FB_INPUT. */
fb_status fb_masters_open(fb_masters *out, const fb_manifest *m, const char *dir, fb_error *err);
/* Any thread.  FB_IO: a file became shorter, or cannot be read. */
fb_status fb_masters_read(const fb_masters *s, const fb_param *p, uint64_t first, uint64_t n, float *out, fb_error *err);
void      fb_masters_close(fb_masters *s); /* a zeroed struct is fine */

/* FB_INPUT: the shard lacks the parameter, or has it with another shape or dtype. */
fb_status fb_check_tensor(const fb_shard *s, const fb_param *p, fb_dtype dtype, fb_error *err);

#endif
