/* shard.h - read one safetensors file.
 *
 * Layout: u64 little-endian header length n, n bytes of JSON, then data; data_offsets count from
 * byte 8 + n.  Source: the safetensors README, "Format".  The file is hostile input: every range is
 * checked against the file's size and against dtype x shape, ranges may neither overlap nor leave holes,
 * and names may not repeat, before any tensor is handed out.
 * Data is read, not mapped: a file that becomes shorter between open and read, or a disk that fails, is an error that a call
 * returns, where a mapping would be SIGBUS; and what was read is held by nobody but the reader.
 * Lifetime: every pointer from a shard dies with fb_shard_close, which also closes the file.
 * Threads: open and close by one thread; find and read by any number between them. */
#ifndef FB_IO_SHARD_H
#define FB_IO_SHARD_H

#include "base/dtype.h"
#include "base/error.h"

enum { FB_RANK_MAX = 8 };

typedef struct fb_shard fb_shard;

typedef struct fb_tensor {
    const fb_shard *shard;               /* that holds it */
    const char     *name;                /* owned by the shard */
    fb_dtype        dtype;
    uint32_t        rank;
    uint64_t        shape[FB_RANK_MAX];  /* outermost first, row-major; a linear weight is [out, in] */
    uint64_t        offset;              /* of its first byte in the file */
    uint64_t        size;                /* bytes == product(shape) * fb_dtype_size(dtype) */
} fb_tensor;

/* n elements from `first` on: as they are in the file, or as float32 (of weights: not FB_I16).  FB_IO: the file has become
 * shorter, or cannot be read. */
fb_status fb_tensor_read(const fb_tensor *t, uint64_t first, uint64_t n, void *out, fb_error *err);
fb_status fb_tensor_read_f32(const fb_tensor *t, uint64_t first, uint64_t n, float *out, fb_error *err);

/* FB_INPUT: the file cannot be read or breaks the format.  FB_NOMEM.  *out is written on success only. */
fb_status fb_shard_open(fb_shard **out, const char *path, fb_error *err);
/* NULL when absent: the caller knows whether absence is an error (a tied lm_head is not). */
const fb_tensor *fb_shard_find(const fb_shard *s, const char *name);
uint32_t         fb_shard_count(const fb_shard *s);
const fb_tensor *fb_shard_at(const fb_shard *s, uint32_t i); /* in file order of data */
const char      *fb_shard_path(const fb_shard *s);
/* The value of a "__metadata__" key, NULL when absent. */
const char *fb_shard_metadata(const fb_shard *s, const char *key);
void        fb_shard_close(fb_shard *s); /* NULL is fine */

/* All shards of a model folder: model.safetensors, or the files that model.safetensors.index.json names.
 * An index that names a missing file, a path outside the folder, or places a tensor in a file that lacks it is
 * FB_INPUT, and so is a tensor of integers. */
typedef struct fb_shard_set fb_shard_set;
fb_status        fb_shard_set_open(fb_shard_set **out, const char *dir, fb_error *err);
const fb_tensor *fb_shard_set_find(const fb_shard_set *s, const char *name);
uint32_t         fb_shard_set_count(const fb_shard_set *s);          /* tensors in all shards */
const fb_tensor *fb_shard_set_at(const fb_shard_set *s, uint32_t i); /* grouped by file */
void             fb_shard_set_close(fb_shard_set *s);

#endif
