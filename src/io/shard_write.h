/* shard_write.h - write safetensors, sharded like Hugging Face's save_pretrained.
 *
 * The caller declares every tensor first, then streams each one's bytes in the declared order, in pieces of
 * any size; nothing holds a whole model.  One shard gives model.safetensors; several give
 * model-00001-of-0000N.safetensors and model.safetensors.index.json.  Every file is written under a temporary
 * name in the same folder, fsynced, and renamed into place by finish; abandon removes the temporary files, so
 * that a failed save leaves what was there before.
 * Threads: one. */
#ifndef FB_IO_SHARD_WRITE_H
#define FB_IO_SHARD_WRITE_H

#include "base/dtype.h"
#include "base/error.h"
#include "io/shard.h"
#include "io/sums.h"

typedef struct fb_shard_writer fb_shard_writer;

/* stem: "model" for a model's weights.  shard_size_max in bytes (a larger tensor gets a shard of its own). */
fb_status fb_shard_writer_new(fb_shard_writer **out, const char *dir, const char *stem, uint64_t shard_size_max,
                              fb_error *err);
fb_status fb_shard_writer_declare(fb_shard_writer *w, const char *name, fb_dtype dtype, uint32_t rank,
                                  const uint64_t *shape, fb_error *err);
/* Appends size bytes to the tensor that is being written; moves on to the next when it is full. */
fb_status fb_shard_writer_append(fb_shard_writer *w, const void *data, uint64_t size, fb_error *err);
/* Before the first byte: finish adds every file to the list, with the sum of what was written.  All tensors are then of one
 * element size, so that the bytes come in the file's order. */
void      fb_shard_writer_sum(fb_shard_writer *w, fb_sums *sums);
/* Every declared tensor must be full.  Frees w whatever happens. */
fb_status fb_shard_writer_finish(fb_shard_writer *w, fb_error *err);
void      fb_shard_writer_abandon(fb_shard_writer *w); /* NULL is fine */

#endif
