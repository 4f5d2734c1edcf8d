#include "io/shard_write.h"

#include "io/file.h"
#include "io/sys.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <xxhash.h>

typedef struct entry {
    char    *name;
    fb_dtype dtype;
    uint32_t rank, shard;
    uint64_t shape[FB_RANK_MAX], size;
    uint64_t offset; /* in its shard's data */
} entry;

struct fb_shard_writer {
    char    *dir, *stem;
    uint64_t shard_size_max;
    entry   *entries;
    uint32_t n_entry, entry_max;
    uint32_t n_shard;   /* 0 until the plan is made */
    uint32_t n_written; /* shards complete under their temporary names */
    uint32_t current;   /* the entry being written */
    uint64_t filled;    /* its bytes so far */
    int      fd;        /* the shard being written, or -1 */
    uint64_t body;      /* where its data start */
    uint64_t end, clean; /* bytes written to it; of these, on their way to the disk */
    fb_sums *sums;      /* NULL: not wanted */
    XXH3_state_t *sum;  /* of the shard being written */
};

/* Bytes that are sent to the disk at a time. */
static const uint64_t WINDOW = 32u << 20;

static const char temporary_suffix[] = ".tmp";

fb_status fb_shard_writer_new(fb_shard_writer **out, const char *dir, const char *stem, uint64_t shard_size_max,
                              fb_error *err)
{
    assert(shard_size_max > 0);
    fb_shard_writer *w = calloc(1, sizeof *w);
    if (w) {
        w->fd = -1;
        w->dir = strdup(dir);
        w->stem = strdup(stem);
        w->shard_size_max = shard_size_max;
    }
    if (!w || !w->dir || !w->stem) {
        fb_shard_writer_abandon(w);
        return fb_fail_file(err, FB_NOMEM, dir, "no memory to write shards");
    }
    *out = w;
    return FB_OK;
}

void fb_shard_writer_sum(fb_shard_writer *w, fb_sums *sums)
{
    assert(w->n_shard == 0);
    w->sums = sums;
}

fb_status fb_shard_writer_declare(fb_shard_writer *w, const char *name, fb_dtype dtype, uint32_t rank,
                                  const uint64_t *shape, fb_error *err)
{
    assert(w->n_shard == 0); /* all declarations come before the first byte */
    assert(rank <= FB_RANK_MAX);
    if (w->n_entry == w->entry_max) {
        uint32_t more = w->entry_max ? 2 * w->entry_max : 64;
        entry   *grown = realloc(w->entries, more * sizeof *grown);
        if (!grown)
            return fb_fail_file(err, FB_NOMEM, w->dir, "no memory to declare %u tensors", more);
        w->entries = grown;
        w->entry_max = more;
    }
    entry e = { .dtype = dtype, .rank = rank, .size = fb_dtype_size(dtype) };
    for (uint32_t i = 0; i < rank; i++) {
        e.shape[i] = shape[i];
        if (__builtin_mul_overflow(e.size, shape[i], &e.size))
            return fb_fail_file(err, FB_FAILED, w->dir, "the shape of '%.96s' overflows 64 bits", name);
    }
    e.name = strdup(name);
    if (!e.name)
        return fb_fail_file(err, FB_NOMEM, w->dir, "no memory to declare '%.96s'", name);
    w->entries[w->n_entry++] = e;
    return FB_OK;
}

static int compare_entry_name(const void *a, const void *b)
{
    return strcmp((*(const entry *const *)a)->name, (*(const entry *const *)b)->name);
}

static fb_status check_unique(const fb_shard_writer *w, fb_error *err)
{
    fb_status     st = FB_OK;
    const entry **sorted = calloc((size_t)w->n_entry + 1, sizeof *sorted);
    if (!sorted)
        return fb_fail_file(err, FB_NOMEM, w->dir, "no memory to write %u tensors", w->n_entry);
    for (uint32_t i = 0; i < w->n_entry; i++)
        sorted[i] = &w->entries[i];
    qsort(sorted, w->n_entry, sizeof *sorted, compare_entry_name);
    for (uint32_t i = 1; i < w->n_entry && st == FB_OK; i++)
        if (strcmp(sorted[i - 1]->name, sorted[i]->name) == 0)
            st = fb_fail_file(err, FB_FAILED, w->dir, "the tensor '%.96s' was declared twice", sorted[i]->name);
    free(sorted);
    return st;
}

/* Entries [first, end) make one shard.  Four-byte elements are laid out before two-byte ones, else in declared order,
 * so that every tensor is aligned to its element: readers that view the file in place need that. */
static void lay_out(fb_shard_writer *w, uint32_t first, uint32_t end, uint32_t shard)
{
    uint64_t offset = 0;
    for (uint64_t element = 4; element >= 2; element -= 2)
        for (uint32_t i = first; i < end; i++) {
            entry *e = &w->entries[i];
            if (fb_dtype_size(e->dtype) != element)
                continue;
            e->shard = shard;
            e->offset = offset;
            offset += e->size;
        }
}

static fb_status plan_shards(fb_shard_writer *w, fb_error *err)
{
    fb_status st = check_unique(w, err);
    if (st != FB_OK)
        return st;
    uint32_t first = 0;
    uint64_t size = 0, total = 0;
    for (uint32_t i = 0; i < w->n_entry; i++) {
        uint64_t more = w->entries[i].size;
        if (__builtin_add_overflow(total, more, &total) || total > INT64_MAX)
            return fb_fail_file(err, FB_FAILED, w->dir, "the tensors' bytes overflow 63 bits");
        if (i > first && size + more > w->shard_size_max) { /* a tensor over the limit stays alone */
            lay_out(w, first, i, w->n_shard++);
            first = i;
            size = 0;
        }
        size += more;
    }
    lay_out(w, first, w->n_entry, w->n_shard++);
    return FB_OK;
}

static fb_status shard_name(char *buf, size_t size, const fb_shard_writer *w, uint32_t shard, const char *suffix, fb_error *err)
{
    int length = w->n_shard == 1 ? snprintf(buf, size, "%s/%s.safetensors%s", w->dir, w->stem, suffix)
                                 : snprintf(buf, size, "%s/%s-%05u-of-%05u.safetensors%s", w->dir, w->stem, shard + 1,
                                            w->n_shard, suffix);
    return length >= 0 && (size_t)length < size
               ? FB_OK
               : fb_fail_file(err, FB_CONFIG, w->dir, "the paths of its shards are longer than %zu bytes", size - 1);
}

/* In order of data, so that a reader that walks the header walks the file. */
static json_t *header_json(const fb_shard_writer *w, uint32_t shard)
{
    json_t *root = json_object();
    int     failed = !root || json_object_set_new(root, "__metadata__", json_pack("{s:s}", "format", "pt")) != 0;
    for (uint64_t element = 4; element >= 2; element -= 2)
        for (uint32_t i = 0; i < w->n_entry && !failed; i++) {
            const entry *e = &w->entries[i];
            if (e->shard != shard || fb_dtype_size(e->dtype) != element)
                continue;
            json_t *shape = json_array();
            for (uint32_t d = 0; d < e->rank; d++)
                failed |= json_array_append_new(shape, json_integer((json_int_t)e->shape[d])) != 0;
            failed |= json_object_set_new(root, e->name, json_pack("{s:s, s:o, s:[I, I]}", "dtype", fb_dtype_str(e->dtype),
                                                                   "shape", shape, "data_offsets", (json_int_t)e->offset,
                                                                   (json_int_t)(e->offset + e->size))) != 0;
        }
    if (!failed)
        return root;
    json_decref(root);
    return NULL;
}

static fb_status write_at(const fb_shard_writer *w, const void *data, uint64_t size, uint64_t at, fb_error *err)
{
    const char *from = data;
    while (size) {
        ssize_t n = fb_sys_pwrite(w->fd, from, size, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fb_fail_file(err, FB_IO, w->dir, "shard %u of %u of '%s' cannot be written: %s", w->n_written + 1, w->n_shard,
                                w->stem, strerror(errno));
        from += n;
        at += (uint64_t)n;
        size -= (uint64_t)n;
    }
    return FB_OK;
}

/* Sends full windows on their way, waits for the one before, and drops its pages: a large file neither fills the page cache with
 * what nobody reads again, nor leaves all its writing to the fsync at the end. */
static fb_status write_behind(fb_shard_writer *w, fb_error *err)
{
    for (; w->end - w->clean >= WINDOW; w->clean += WINDOW) {
        bool failed = sync_file_range(w->fd, (off_t)w->clean, (off_t)WINDOW, SYNC_FILE_RANGE_WRITE) != 0;
        if (w->clean && !failed) {
            failed = sync_file_range(w->fd, (off_t)(w->clean - WINDOW), (off_t)WINDOW, SYNC_FILE_RANGE_WAIT_BEFORE
                                     | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER) != 0;
            posix_fadvise(w->fd, (off_t)(w->clean - WINDOW), (off_t)WINDOW, POSIX_FADV_DONTNEED);
        }
        /* A file system without the call loses nothing but the head start; an error of the disk is told only once, here. */
        if (failed && (errno == EIO || errno == ENOSPC || errno == EDQUOT))
            return fb_fail_file(err, FB_IO, w->dir, "shard %u of %u of '%s' cannot be written: %s", w->n_written + 1, w->n_shard,
                                w->stem, strerror(errno));
    }
    return FB_OK;
}

/* At the end of the shard's bytes so far, where they are summed. */
static fb_status write_next(fb_shard_writer *w, const void *data, uint64_t size, uint64_t at, fb_error *err)
{
    fb_status st = write_at(w, data, size, at, err);
    if (st != FB_OK)
        return st;
    if (w->sums) {
        assert(at == w->end);
        XXH3_128bits_update(w->sum, data, size);
    }
    w->end += size;
    return write_behind(w, err);
}

static fb_status write_header(fb_shard_writer *w, fb_error *err)
{
    json_t *root = header_json(w, w->n_written);
    char   *text = root ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    if (!text)
        return fb_fail_file(err, FB_NOMEM, w->dir, "the header of shard %u of '%s' cannot be built: no memory, or a name that is "
                            "not UTF-8", w->n_written + 1, w->stem);
    uint64_t length = strlen(text), padded = (length + 7) / 8 * 8;
    fb_status st = write_next(w, &padded, sizeof padded, 0, err);
    if (st == FB_OK)
        st = write_next(w, text, length, 8, err);
    if (st == FB_OK)
        st = write_next(w, "       ", padded - length, 8 + length, err);
    free(text);
    w->body = 8 + padded;
    return st;
}

/* Opens shard n_written under its temporary name and writes its header. */
static fb_status shard_begin(fb_shard_writer *w, fb_error *err)
{
    char      path[FB_PATH_SIZE];
    fb_status st = shard_name(path, sizeof path, w, w->n_written, temporary_suffix, err);
    if (st != FB_OK)
        return st;
    fb_sys_unlink(path); /* with O_EXCL: neither a killed run's rest nor a planted link is written to */
    w->fd = fb_sys_open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (w->fd < 0)
        return fb_fail_file(err, FB_IO, path, "cannot be created: %s", strerror(errno));
    w->end = w->clean = 0;
    if (w->sums && !w->sum && !(w->sum = XXH3_createState()))
        return fb_fail_file(err, FB_NOMEM, path, "no memory for its sum");
    if (w->sums)
        XXH3_128bits_reset(w->sum);
    return write_header(w, err);
}

static fb_status note_sum(const fb_shard_writer *w, fb_error *err)
{
    char path[FB_PATH_SIZE], digits[FB_SUM_DIGITS + 1];
    fb_status st = shard_name(path, sizeof path, w, w->n_written, "", err);
    fb_sums_digits(digits, XXH3_128bits_digest(w->sum));
    return st == FB_OK ? fb_sums_add(w->sums, strrchr(path, '/') + 1, w->end, digits, err) : st;
}

static fb_status shard_end(fb_shard_writer *w, fb_error *err)
{
    int failed = fb_sys_fsync(w->fd) != 0, why = errno;
    if (close(w->fd) != 0 && !failed)
        failed = 1, why = errno;
    w->fd = -1;
    if (failed)
        return fb_fail_file(err, FB_IO, w->dir, "shard %u of %u of '%s' cannot be made durable: %s", w->n_written + 1, w->n_shard,
                            w->stem, strerror(why));
    fb_status st = w->sums ? note_sum(w, err) : FB_OK;
    w->n_written++;
    return st;
}

/* Opens and closes shards until the current entry can take bytes or nothing is left to write. */
static fb_status advance(fb_shard_writer *w, fb_error *err)
{
    fb_status st = FB_OK;
    if (w->n_shard == 0)
        FB_TRY(plan_shards(w, err));
    while (w->n_written < w->n_shard) {
        if (w->fd < 0)
            FB_TRY(shard_begin(w, err));
        while (w->current < w->n_entry && w->entries[w->current].shard == w->n_written) {
            if (w->filled < w->entries[w->current].size)
                return FB_OK;
            w->current++;
            w->filled = 0;
        }
        FB_TRY(shard_end(w, err));
    }
done:
    return st;
}

fb_status fb_shard_writer_append(fb_shard_writer *w, const void *data, uint64_t size, fb_error *err)
{
    fb_status   st = FB_OK;
    const char *from = data;
    while (size) {
        FB_TRY(advance(w, err));
        assert(w->current < w->n_entry); /* more bytes than were declared */
        entry   *e = &w->entries[w->current];
        uint64_t piece = e->size - w->filled < size ? e->size - w->filled : size;
        FB_TRY(write_next(w, from, piece, w->body + e->offset + w->filled, err));
        w->filled += piece;
        from += piece;
        size -= piece;
    }
    FB_TRY(advance(w, err));
done:
    return st;
}

static fb_status write_index(const fb_shard_writer *w, fb_error *err)
{
    char     path[FB_PATH_SIZE];
    uint64_t total = 0;
    json_t  *map = json_object();
    int      failed = !map;
    for (uint32_t i = 0; i < w->n_entry && !failed; i++) {
        const entry *e = &w->entries[i];
        fb_status    st = shard_name(path, sizeof path, w, e->shard, "", err);
        if (st != FB_OK) {
            json_decref(map);
            return st;
        }
        total += e->size;
        failed = json_object_set_new(map, e->name, json_string(strrchr(path, '/') + 1)) != 0;
    }
    json_t *root = json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)total, "weight_map", map);
    char   *text = root && !failed ? json_dumps(root, JSON_INDENT(2) | JSON_SORT_KEYS) : NULL;
    json_decref(root);
    if (!text)
        return fb_fail_file(err, FB_NOMEM, w->dir, "no memory for the index of '%s'", w->stem);
    int       length = snprintf(path, sizeof path, "%s/%s.safetensors.index.json", w->dir, w->stem);
    fb_status st = length >= 0 && (size_t)length < sizeof path
                       ? fb_file_write_atomic(path, text, strlen(text), err)
                       : fb_fail_file(err, FB_CONFIG, w->dir, "the path of its index is too long");
    free(text);
    return st;
}

/* Whether name is "<stem>-NNNNN-of-NNNNN.safetensors", and of how many. */
static bool is_shard_of(const char *name, const char *stem, uint32_t *of)
{
    size_t   length = strlen(stem);
    unsigned index, count;
    int      end = -1;
    if (strncmp(name, stem, length) != 0)
        return false;
    if (sscanf(name + length, "-%5u-of-%5u.safetensors%n", &index, &count, &end) != 2 || end < 0 || name[length + (size_t)end])
        return false;
    *of = count;
    return true;
}

/* An earlier save of another number of shards would mislead a loader: model.safetensors wins over an index, and an
 * index over nothing.  They go after the new files are in place, so that a loadable model is there at any instant. */
static fb_status remove_stale(const fb_shard_writer *w, fb_error *err)
{
    char           single[FB_PATH_SIZE], index[FB_PATH_SIZE];
    const char    *victim = NULL;
    uint32_t       of;
    struct dirent *item;
    snprintf(single, sizeof single, "%s.safetensors", w->stem);
    snprintf(index, sizeof index, "%s.safetensors.index.json", w->stem);
    DIR *dir = opendir(w->dir);
    if (!dir)
        return fb_fail_file(err, FB_IO, w->dir, "cannot be listed: %s", strerror(errno));
    while (!victim && (item = readdir(dir)) != NULL) {
        const char *name = item->d_name;
        bool        stale = is_shard_of(name, w->stem, &of) ? w->n_shard == 1 || of != w->n_shard
                                                            : strcmp(name, w->n_shard == 1 ? index : single) == 0;
        if (stale && fb_sys_unlinkat(dirfd(dir), name, 0) != 0)
            victim = name;
    }
    fb_status st = FB_OK;
    if (victim)
        st = fb_fail_file(err, FB_IO, w->dir, "'%.96s' of an earlier save cannot be removed: %s", victim, strerror(errno));
    closedir(dir);
    return st == FB_OK ? fb_dir_sync(w->dir, err) : st;
}

static fb_status check_full(const fb_shard_writer *w, fb_error *err)
{
    if (w->n_written == w->n_shard)
        return FB_OK;
    const entry *e = &w->entries[w->current];
    return fb_fail_file(err, FB_FAILED, w->dir, "the tensor '%.96s' got %llu of its %llu bytes; the save was dropped", e->name,
                        (unsigned long long)w->filled, (unsigned long long)e->size);
}

static fb_status rename_all(const fb_shard_writer *w, fb_error *err)
{
    fb_status st = FB_OK;
    char      temporary[FB_PATH_SIZE], final[FB_PATH_SIZE];
    for (uint32_t i = 0; i < w->n_shard; i++) {
        FB_TRY(shard_name(temporary, sizeof temporary, w, i, temporary_suffix, err));
        FB_TRY(shard_name(final, sizeof final, w, i, "", err));
        if (fb_sys_rename(temporary, final) != 0) {
            st = fb_fail_file(err, FB_IO, final, "cannot be renamed into place: %s", strerror(errno));
            goto done;
        }
    }
    FB_TRY(fb_dir_sync(w->dir, err));
done:
    return st;
}

fb_status fb_shard_writer_finish(fb_shard_writer *w, fb_error *err)
{
    fb_status st = FB_OK;
    FB_TRY(advance(w, err)); /* trailing empty tensors; a set of none at all */
    FB_TRY(check_full(w, err));
    FB_TRY(rename_all(w, err));
    if (w->n_shard > 1)
        FB_TRY(write_index(w, err));
    FB_TRY(remove_stale(w, err));
done:
    fb_shard_writer_abandon(w); /* after a success no temporary file is left to remove */
    return st;
}

void fb_shard_writer_abandon(fb_shard_writer *w)
{
    if (!w)
        return;
    char path[FB_PATH_SIZE];
    if (w->fd >= 0)
        close(w->fd);
    for (uint32_t i = 0; i < w->n_shard; i++)
        if (shard_name(path, sizeof path, w, i, temporary_suffix, NULL) == FB_OK)
            fb_sys_unlink(path);
    for (uint32_t i = 0; i < w->n_entry; i++)
        free(w->entries[i].name);
    free(w->entries);
    XXH3_freeState(w->sum);
    free(w->dir);
    free(w->stem);
    free(w);
}
