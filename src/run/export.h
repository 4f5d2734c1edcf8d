/* export.h - a Hugging Face folder from the state in memory: what from_pretrained loads.
 *
 * config.json keeps every field of the source's but the dtype; tokenizer, template and generation files are
 * copied as they are.  Weights first, config.json last, each renamed into place whole. */
#ifndef FB_RUN_EXPORT_H
#define FB_RUN_EXPORT_H

#include "train/state.h"

/* Where the weights are cut into shards, as save_pretrained does. */
#define FB_EXPORT_SHARD_SIZE (UINT64_C(5) << 30)

/* dtype: of the weights written.  The state must be settled. */
fb_status fb_export_model(const fb_state *s, const char *source_dir, const char *out_dir, fb_dtype dtype, fb_error *err);
/* The weights alone, from wherever read finds them: n elements of the parameter from element first, as float32. */
typedef fb_status (*fb_weight_reader)(const void *ctx, const fb_param *p, uint64_t first, uint64_t n, float *out, fb_error *err);
fb_status fb_export_weights(const fb_manifest *m, fb_weight_reader read, const void *ctx, const char *out_dir, fb_dtype dtype,
                            fb_error *err);
/* The small files go along as they are, and a folder that is exported is often published, so none may be a link to a file elsewhere
 * on this machine: FB_INPUT.  For a run's start; fb_export_companions looks again. */
fb_status fb_export_check(const char *source_dir, fb_error *err);
/* The small files alone: tokenizer, template, generation_config.json. */
fb_status fb_export_companions(const char *source_dir, const char *out_dir, fb_error *err);
uint64_t  fb_export_companions_size(const char *source_dir); /* bytes of those that are there */
/* config.json alone. */
fb_status fb_export_config(const fb_model_config *c, const char *out_dir, fb_dtype dtype, fb_error *err);

#endif
