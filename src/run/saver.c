#include "run/saver.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/clock.h"
#include "io/sums.h"
#include "run/checkpoint_write.h"
#include "run/export.h"

enum { PIECE = FB_UPDATE_CHUNK, PIECE_BYTES = 12 * PIECE, POPULATED = 64 << 20, WRITER_NICE = 10 };

typedef enum { PIECE_SAVED, PIECE_UNSAVED, PIECE_WRITING, PIECE_COPYING, PIECE_COPIED } piece_state;

typedef struct device_piece {
    uint32_t block;
    uint64_t first;
} device_piece;

/* Pieces on their way from the device together. */
typedef struct batch {
    fb_saver *saver;
    uint64_t  first, n; /* device pieces */
} batch;

struct fb_saver {
    fb_saver_options   o;
    char              *output_dir, *model_dir;
    const fb_manifest *manifest;
    uint32_t          *order;       /* [n_block] */
    uint64_t          *first_piece; /* [n_block + 1] */
    uint8_t           *piece;       /* [pieces] piece_state */
    uint32_t          *slot;        /* [pieces] of one that is COPYING or COPIED */
    device_piece      *device_pieces; /* [n_device] in the writer's order */
    uint64_t          *device_end;  /* [n_block] how many there are up to the block's last */
    batch             *batches;     /* [n_device] the one that begins there */
    uint64_t           n_device, n_sent; /* of the save in hand, so far */
    fb_host_memory     buffer;      /* pinned, if there are device pieces */
    uint32_t          *free_slots, n_free;

    uint64_t           n_unsaved;   /* pieces that are not SAVED; also looked at without the lock */
    bool               requested, busy, stop, given_up, untold;
    uint64_t           step;
    char              *trainer_state;
    fb_saver_report    report;
    fb_status          status;
    fb_error           error;
    double             begun, waiting_since;
    uint32_t           n_waiting;
    pthread_t          thread;
    bool               has_thread;
    pthread_mutex_t    lock;
    pthread_cond_t     moved;       /* any piece, or the save as a whole */
};

static uint64_t pieces_of(const fb_block_desc *d)
{
    return (d->extent + PIECE - 1) / PIECE;
}

uint64_t fb_saver_buffer_most(const fb_manifest *m)
{
    uint64_t n = 0;
    for (uint32_t b = 0; b < m->n_block; b++)
        n += pieces_of(&m->blocks[b]);
    return n * PIECE_BYTES;
}

uint64_t fb_saver_buffer_least(void)
{
    return PIECE_BYTES;
}

/* ---- pieces ---- */

static uint64_t length_of(const fb_saver *s, uint32_t block, uint64_t first)
{
    uint64_t left = s->manifest->blocks[block].extent - first;
    return left < PIECE ? left : PIECE;
}

static uint64_t piece_of(const fb_saver *s, uint32_t block, uint64_t first)
{
    return s->first_piece[block] + first / PIECE;
}

static fb_piece in_state(const fb_saver *s, uint32_t block, uint64_t first)
{
    const fb_state *t = s->o.state;
    return (fb_piece){ .dtype = t->act, .weights = fb_state_at(t, FB_HOST_WEIGHTS, block, first),
        .remainders = t->act == FB_BF16 ? fb_state_at(t, FB_HOST_REMAINDERS, block, first) : NULL,
        .m = fb_state_at(t, FB_HOST_M, block, first), .v = fb_state_at(t, FB_HOST_V, block, first) };
}

/* How a piece lies in its slot: four bytes an element for the master, whole or as two halves, and four for either moment. */
static fb_piece in_buffer(const fb_saver *s, uint32_t slot, fb_dtype dtype)
{
    unsigned char *at = s->buffer.at + (uint64_t)slot * PIECE_BYTES;
    return (fb_piece){ .dtype = dtype, .weights = at, .remainders = dtype == FB_BF16 ? (int16_t *)(void *)(at + 2 * PIECE) : NULL,
                       .m = (float *)(void *)(at + 4 * PIECE), .v = (float *)(void *)(at + 8 * PIECE) };
}

static void copy_from_host(const fb_saver *s, uint32_t block, uint64_t first, uint32_t slot)
{
    fb_piece from = in_state(s, block, first), to = in_buffer(s, slot, from.dtype);
    uint64_t n = length_of(s, block, first);
    memcpy((void *)to.weights, from.weights, n * fb_dtype_size(from.dtype));
    if (from.remainders)
        memcpy((void *)to.remainders, from.remainders, n * sizeof *from.remainders);
    memcpy((void *)to.m, from.m, n * sizeof *from.m);
    memcpy((void *)to.v, from.v, n * sizeof *from.v);
}

static fb_status download(const fb_saver *s, uint32_t block, uint64_t first, uint32_t slot, fb_error *err)
{
    fb_piece to = in_buffer(s, slot, s->o.state->act);
    return fb_state_download(s->o.state, block, first, length_of(s, block, first), (void *)to.weights, (int16_t *)to.remainders,
                             (float *)to.m, (float *)to.v, err);
}

/* The functions below are called with the lock held; those that work let it go meanwhile. */

static void move(fb_saver *s, uint64_t piece, piece_state to)
{
    static const uint8_t from[] = {
        [PIECE_SAVED] = 1u << PIECE_WRITING | 1u << PIECE_COPIED, [PIECE_UNSAVED] = 1u << PIECE_SAVED,
        [PIECE_WRITING] = 1u << PIECE_UNSAVED, [PIECE_COPYING] = 1u << PIECE_UNSAVED, [PIECE_COPIED] = 1u << PIECE_COPYING,
    };
    assert(from[to] >> s->piece[piece] & 1);
    s->piece[piece] = (uint8_t)to;
    pthread_cond_broadcast(&s->moved);
}

static void give_slot(fb_saver *s, uint64_t piece)
{
    s->free_slots[s->n_free++] = s->slot[piece];
}

static void take_slot(fb_saver *s, uint64_t piece)
{
    s->slot[piece] = s->free_slots[--s->n_free];
    move(s, piece, PIECE_COPYING);
}

static void give_up(fb_saver *s, fb_status st, const fb_error *err)
{
    s->given_up = true;
    s->status = st;
    s->error = *err;
    pthread_cond_broadcast(&s->moved);
}

static void wait_for_disk(fb_saver *s)
{
    if (!s->n_waiting++)
        s->waiting_since = fb_clock();
    pthread_cond_wait(&s->moved, &s->lock);
    if (!--s->n_waiting)
        s->report.waited += fb_clock() - s->waiting_since;
}

/* Until the piece may be changed. */
static void secure(fb_saver *s, uint32_t block, uint64_t first)
{
    uint64_t p = piece_of(s, block, first);
    while (!s->given_up && s->piece[p] != PIECE_SAVED && s->piece[p] != PIECE_COPIED) {
        uint32_t kept = s->n_sent < s->n_device; /* a slot for the device */
        if (s->piece[p] != PIECE_UNSAVED || s->n_free <= kept) {
            wait_for_disk(s);
            continue;
        }
        take_slot(s, p);
        pthread_mutex_unlock(&s->lock);
        copy_from_host(s, block, first, s->slot[p]);
        pthread_mutex_lock(&s->lock);
        move(s, p, PIECE_COPIED);
    }
}

static void before_update(void *ctx, uint32_t block, uint64_t first, uint64_t n)
{
    fb_saver *s = ctx;
    if (!__atomic_load_n(&s->n_unsaved, __ATOMIC_ACQUIRE))
        return;
    pthread_mutex_lock(&s->lock);
    for (uint64_t at = first / PIECE * PIECE; at < first + n; at += PIECE)
        secure(s, block, at);
    pthread_mutex_unlock(&s->lock);
}

/* ---- from the device ---- */

static void land(const batch *b)
{
    fb_saver *s = b->saver;
    for (uint64_t i = b->first; i < b->first + b->n; i++) {
        uint64_t p = piece_of(s, s->device_pieces[i].block, s->device_pieces[i].first);
        if (s->piece[p] == PIECE_COPYING) /* a call that failed may have called back, or not */
            move(s, p, PIECE_COPIED);
    }
}

static void batch_landed(void *arg, bool failed)
{
    const batch *b = arg;
    fb_saver *s = b->saver;
    fb_error why;
    pthread_mutex_lock(&s->lock);
    if (failed)
        give_up(s, fb_fail(&why, FB_DEVICE, "checkpoint: the device failed before it had given its state"), &why);
    land(b);
    pthread_mutex_unlock(&s->lock);
}

/* Without the lock, which batch_landed takes. */
static fb_status enqueue(batch *b, fb_trace *trace, fb_error *err)
{
    fb_status st = FB_OK;
    fb_saver *s = b->saver;
    const device_piece *piece = &s->device_pieces[b->first];
    const fb_device_ops *ops = s->o.state->device->ops;
    uint64_t elems = 0;
    for (uint64_t i = 0; i < b->n; i++)
        elems += length_of(s, piece[i].block, piece[i].first);
    FB_TRY(fb_trace_begin(trace, FB_STREAM_D2H, FB_LABEL(FETCH_STATE, piece->block, FB_NO_PART), elems * (PIECE_BYTES / PIECE), err));
    for (uint64_t i = 0; i < b->n; i++)
        FB_TRY(download(s, piece[i].block, piece[i].first, s->slot[piece_of(s, piece[i].block, piece[i].first)], err));
    FB_TRY(fb_trace_end(trace, FB_STREAM_D2H, err));
    FB_TRY(ops->call(s->o.state->device, FB_STREAM_D2H, batch_landed, b, err));
done:
    return st;
}

/* The next n device pieces, as far as there are slots.  The engine's thread. */
static fb_status send_batch(fb_saver *s, uint64_t n, fb_trace *trace, fb_error *err)
{
    batch *b = &s->batches[s->n_sent];
    fb_device *d = s->o.state->device;
    n = n < s->n_free ? n : s->n_free;
    if (!n || s->given_up)
        return FB_OK;
    *b = (batch){ s, s->n_sent, n };
    for (; s->n_sent < b->first + n; s->n_sent++)
        take_slot(s, piece_of(s, s->device_pieces[s->n_sent].block, s->device_pieces[s->n_sent].first));
    pthread_mutex_unlock(&s->lock);
    fb_status st = enqueue(b, trace, err);
    pthread_mutex_lock(&s->lock);
    if (st == FB_OK)
        return FB_OK;
    give_up(s, st, err); /* first, since the stream may stand behind a worker that waits here */
    pthread_mutex_unlock(&s->lock);
    d->ops->sync(d, FB_STREAM_D2H, NULL); /* what was enqueued still writes to the slots */
    pthread_mutex_lock(&s->lock);
    land(b);
    return st;
}

static bool any_copying(const fb_saver *s, uint64_t first, uint64_t end)
{
    return memchr(s->piece + first, PIECE_COPYING, end - first) != NULL;
}

static fb_status during_step(void *ctx, uint32_t n_left, fb_error *err)
{
    fb_saver *s = ctx;
    if (!__atomic_load_n(&s->n_unsaved, __ATOMIC_ACQUIRE))
        return FB_OK;
    pthread_mutex_lock(&s->lock);
    fb_status st = send_batch(s, (s->n_device - s->n_sent + n_left) / (n_left + 1), s->o.trace, err);
    pthread_mutex_unlock(&s->lock);
    return st;
}

static fb_status before_update_at_home(void *ctx, uint32_t block, bool *read, fb_error *err)
{
    fb_saver *s = ctx;
    fb_status st = FB_OK;
    *read = false;
    if (!__atomic_load_n(&s->n_unsaved, __ATOMIC_ACQUIRE))
        return FB_OK;
    pthread_mutex_lock(&s->lock);
    while (st == FB_OK && s->n_sent < s->device_end[block] && !s->given_up) {
        if (s->n_free)
            st = send_batch(s, s->device_end[block] - s->n_sent, s->o.trace, err);
        else
            wait_for_disk(s);
    }
    *read = any_copying(s, s->first_piece[block], s->first_piece[block + 1]);
    pthread_mutex_unlock(&s->lock);
    return st;
}

fb_engine_hooks fb_saver_hooks(fb_saver *s)
{
    return (fb_engine_hooks){ s, before_update, during_step, before_update_at_home };
}

/* ---- the writer ---- */

static fb_status write_piece(fb_saver *s, fb_checkpoint_writer *w, uint32_t block, uint64_t first, fb_error *err)
{
    uint64_t p = piece_of(s, block, first);
    bool on_device = fb_state_on_device(s->o.state, block);
    pthread_mutex_lock(&s->lock);
    while (!s->given_up && (s->piece[p] == PIECE_COPYING || (on_device && s->piece[p] == PIECE_UNSAVED)))
        pthread_cond_wait(&s->moved, &s->lock);
    if (s->given_up) { /* the device failed */
        fb_status st = s->status;
        *err = s->error;
        pthread_mutex_unlock(&s->lock);
        return st;
    }
    bool copied = s->piece[p] == PIECE_COPIED;
    fb_piece from = copied ? in_buffer(s, s->slot[p], s->o.state->act) : in_state(s, block, first);
    if (!copied)
        move(s, p, PIECE_WRITING);
    pthread_mutex_unlock(&s->lock);
    fb_status st = fb_checkpoint_writer_append(w, block, first, length_of(s, block, first), &from, err);
    pthread_mutex_lock(&s->lock);
    if (copied)
        give_slot(s, p);
    move(s, p, PIECE_SAVED);
    __atomic_sub_fetch(&s->n_unsaved, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&s->lock);
    return st;
}

static fb_status write_state(fb_saver *s, const char *dir, fb_sums *sums, fb_error *err)
{
    fb_status st = FB_OK;
    fb_checkpoint_writer *w;
    FB_TRY(fb_checkpoint_writer_new(&w, s->manifest, s->order, dir, s->o.save_dtype, err));
    for (uint32_t i = 0; i < s->manifest->n_block && st == FB_OK; i++)
        for (uint64_t at = 0; at < s->manifest->blocks[s->order[i]].extent && st == FB_OK; at += PIECE)
            st = write_piece(s, w, s->order[i], at, err);
    if (st != FB_OK)
        fb_checkpoint_writer_abandon(w);
    else
        st = fb_checkpoint_writer_finish(w, sums, err);
done:
    return st;
}

static fb_status write_checkpoint(fb_saver *s, fb_error *err)
{
    fb_status st = FB_OK;
    char dir[FB_PATH_SIZE], path[FB_PATH_SIZE];
    fb_sums sums = { 0 };
    FB_TRY(fb_checkpoint_folder(dir, s->output_dir, s->step, ".tmp", err));
    FB_TRY(fb_dir_remove(dir, err));
    FB_TRY(fb_dir_make(dir, err));
    FB_TRY(write_state(s, dir, &sums, err));
    FB_TRY(fb_path_join(path, sizeof path, dir, "trainer_state.json", err));
    FB_TRY(fb_file_write_atomic(path, s->trainer_state, strlen(s->trainer_state), err));
    FB_TRY(fb_export_companions(s->model_dir, dir, err));
    FB_TRY(fb_export_config(&s->manifest->cfg, dir, s->o.save_dtype, err));
    FB_TRY(fb_sums_add_rest(&sums, dir, err));
    FB_TRY(fb_sums_write(&sums, dir, err));
    FB_TRY(fb_checkpoint_publish(s->output_dir, s->step, err));
    FB_TRY(fb_checkpoint_prune(s->output_dir, s->step, s->o.n_kept, err));
done:
    if (st != FB_OK) /* half a checkpoint helps nobody, least of all on a full disk */
        fb_dir_remove(dir, NULL);
    fb_sums_free(&sums);
    return st;
}

/* Nobody waits for pieces that will not be written. */
static void end_save(fb_saver *s, fb_status st, const fb_error *err)
{
    for (uint64_t p = 0; p < s->first_piece[s->manifest->n_block]; p++)
        if (s->piece[p] == PIECE_COPIED)
            give_slot(s, p);
    memset(s->piece, PIECE_SAVED, s->first_piece[s->manifest->n_block]);
    __atomic_store_n(&s->n_unsaved, 0, __ATOMIC_RELEASE);
    s->n_sent = s->n_device;
    s->status = st;
    s->error = st == FB_OK ? (fb_error){ 0 } : *err;
    s->busy = false;
    s->untold = true;
    s->report.seconds = fb_clock() - s->begun;
    free(s->trainer_state);
    s->trainer_state = NULL;
    pthread_cond_broadcast(&s->moved);
}

/* The buffer takes its pages now and not in a save hours later, when the memory may be another's.  The kernel does it, since a
 * worker may be copying into it already; one that cannot (before Linux 5.14) leaves it to the first use. */
static void populate(fb_saver *s)
{
    bool stop = false;
    for (uint64_t at = 0; at < s->buffer.size && !stop; at += POPULATED) {
        uint64_t size = s->buffer.size - at < POPULATED ? s->buffer.size - at : POPULATED;
        stop = madvise(s->buffer.at + at, size, MADV_POPULATE_WRITE) != 0;
        pthread_mutex_lock(&s->lock);
        stop |= s->stop;
        pthread_mutex_unlock(&s->lock);
    }
}

static void *writer_main(void *arg)
{
    fb_saver *s = arg;
    fb_error err = { 0 };
    /* Where cores are short, training goes first; while it waits for the disk, they are free.  Only this thread, as Linux has
     * it. */
    setpriority(PRIO_PROCESS, (id_t)gettid(), WRITER_NICE);
    if (!s->buffer.pinned_for) /* pinning took them */
        populate(s);
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->requested && !s->stop)
            pthread_cond_wait(&s->moved, &s->lock);
        if (!s->requested)
            break;
        s->requested = false;
        pthread_mutex_unlock(&s->lock);
        fb_status st = write_checkpoint(s, &err);
        pthread_mutex_lock(&s->lock);
        if (st != FB_OK)
            give_up(s, st, &err);
        while (any_copying(s, 0, s->first_piece[s->manifest->n_block]))
            pthread_cond_wait(&s->moved, &s->lock);
        end_save(s, st, &err);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* ---- the engine's side ---- */

void fb_saver_begin(fb_saver *s, uint64_t step, char *trainer_state)
{
    pthread_mutex_lock(&s->lock);
    assert(!s->busy);
    uint64_t n = s->first_piece[s->manifest->n_block];
    for (uint64_t p = 0; p < n; p++)
        move(s, p, PIECE_UNSAVED);
    __atomic_store_n(&s->n_unsaved, n, __ATOMIC_RELEASE);
    s->n_sent = 0;
    s->step = step;
    s->trainer_state = trainer_state;
    s->report = (fb_saver_report){ .step = step, .bytes = fb_checkpoint_size(s->manifest, s->o.save_dtype) };
    s->begun = fb_clock();
    s->busy = s->requested = true;
    s->given_up = s->untold = false;
    pthread_cond_broadcast(&s->moved);
    pthread_mutex_unlock(&s->lock);
}

bool fb_saver_is_busy(fb_saver *s)
{
    pthread_mutex_lock(&s->lock);
    bool busy = s->busy;
    pthread_mutex_unlock(&s->lock);
    return busy;
}

void fb_saver_wait(fb_saver *s)
{
    fb_error unused; /* the end of the save tells */
    if (!s)
        return;
    pthread_mutex_lock(&s->lock);
    while (s->busy)
        if (s->n_sent < s->n_device && s->n_free && !s->given_up)
            (void)send_batch(s, s->n_device - s->n_sent, NULL, &unused); /* untraced: part of no step */
        else
            pthread_cond_wait(&s->moved, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

bool fb_saver_ended(fb_saver *s, fb_saver_report *out, fb_status *st, fb_error *err)
{
    pthread_mutex_lock(&s->lock);
    bool ended = s->untold;
    s->untold = false;
    if (ended) {
        *out = s->report;
        *st = s->status;
        *err = s->error;
    }
    pthread_mutex_unlock(&s->lock);
    return ended;
}

/* ---- new, free ---- */

static fb_status list_device_pieces(fb_saver *s, fb_error *err)
{
    const fb_manifest *m = s->manifest;
    uint64_t n = 0;
    for (uint32_t b = 0; b < m->n_block; b++)
        n += fb_state_on_device(s->o.state, b) ? pieces_of(&m->blocks[b]) : 0;
    s->device_pieces = calloc(n + 1, sizeof *s->device_pieces);
    s->device_end = calloc(m->n_block, sizeof *s->device_end);
    s->batches = calloc(n + 1, sizeof *s->batches);
    if (!s->device_pieces || !s->device_end || !s->batches)
        return fb_fail(err, FB_NOMEM, "saver: no memory for %llu pieces", (unsigned long long)n);
    for (uint32_t i = 0; i < m->n_block; i++) {
        uint32_t b = s->order[i];
        for (uint64_t at = 0; at < m->blocks[b].extent && fb_state_on_device(s->o.state, b); at += PIECE)
            s->device_pieces[s->n_device++] = (device_piece){ b, at };
        s->device_end[b] = s->n_device;
    }
    s->n_sent = s->n_device;
    return FB_OK;
}

fb_status fb_saver_new(fb_saver **out, const fb_saver_options *o, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_manifest *m = o->state->manifest;
    fb_saver *s = calloc(1, sizeof *s);
    if (!s)
        return fb_fail(err, FB_NOMEM, "saver: no memory");
    s->o = *o;
    s->manifest = m;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->moved, NULL);
    uint64_t n_piece = fb_saver_buffer_most(m) / PIECE_BYTES, n_slot = o->buffer_size / PIECE_BYTES;
    n_slot = n_slot < 1 ? 1 : n_slot > n_piece ? n_piece : n_slot;
    s->output_dir = strdup(o->output_dir);
    s->model_dir = strdup(o->model_dir);
    s->order = calloc(m->n_block, sizeof *s->order);
    s->first_piece = calloc(m->n_block + 1, sizeof *s->first_piece);
    s->piece = calloc(n_piece, sizeof *s->piece);
    s->slot = calloc(n_piece, sizeof *s->slot);
    s->free_slots = calloc(n_slot, sizeof *s->free_slots);
    if (!s->output_dir || !s->model_dir || !s->order || !s->first_piece || !s->piece || !s->slot || !s->free_slots)
        FB_TRY(fb_fail(err, FB_NOMEM, "saver: no memory for %llu pieces", (unsigned long long)n_piece));
    for (uint32_t b = 0; b < m->n_block; b++) {
        s->order[b] = o->last_block_first ? m->n_block - 1 - b : b;
        s->first_piece[b + 1] = s->first_piece[b] + pieces_of(&m->blocks[b]);
    }
    FB_TRY(list_device_pieces(s, err));
    FB_TRY(fb_host_memory_map(&s->buffer, n_slot * PIECE_BYTES, "the save buffer; lower save_buffer", s->n_device ? o->team : NULL,
                              s->n_device ? o->state->device : NULL, err));
    for (; s->n_free < n_slot; s->n_free++)
        s->free_slots[s->n_free] = (uint32_t)(n_slot - 1 - s->n_free); /* the lowest first: what was touched is used again */
    if (pthread_create(&s->thread, NULL, writer_main, s) != 0)
        FB_TRY(fb_fail(err, FB_FAILED, "saver: the system refuses a thread"));
    s->has_thread = true;
    *out = s;
    s = NULL;
done:
    fb_saver_free(s);
    return st;
}

void fb_saver_free(fb_saver *s)
{
    if (!s)
        return;
    fb_saver_wait(s);
    if (s->has_thread) {
        pthread_mutex_lock(&s->lock);
        s->stop = true;
        pthread_cond_broadcast(&s->moved);
        pthread_mutex_unlock(&s->lock);
        pthread_join(s->thread, NULL);
    }
    fb_host_memory_unmap(&s->buffer);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->moved);
    free(s->output_dir);
    free(s->model_dir);
    free(s->order);
    free(s->first_piece);
    free(s->piece);
    free(s->slot);
    free(s->free_slots);
    free(s->device_pieces);
    free(s->device_end);
    free(s->batches);
    free(s);
}
