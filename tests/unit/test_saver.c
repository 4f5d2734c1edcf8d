/* Saves under training: whatever the disk, the buffer and the order of updates do, the folder holds the state as it was at begin,
 * byte for byte what a save that nobody disturbed leaves, and training ends with the bits it would have had anyway. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include <cmocka.h>

#include "engine_rig.h"
#include "io/sums.h"
#include "run/checkpoint_write.h"
#include "run/export.h"

/* ---- the disk, as the saver sees it here ---- */

static struct {
    bool     slow;        /* a piece takes its time */
    uint32_t fails_at;    /* the piece that cannot be written, counted from 1; 0: none */
    uint32_t n_append;
    pthread_mutex_t lock;
    pthread_cond_t  moved;
    bool     shut;        /* nothing is written while it is */
} world = { .lock = PTHREAD_MUTEX_INITIALIZER, .moved = PTHREAD_COND_INITIALIZER };

static fb_status open_files(fb_checkpoint_writer **out, const fb_manifest *m, const uint32_t *order, const char *dir,
                            fb_dtype save_dtype, fb_error *err)
{
    pthread_mutex_lock(&world.lock);
    while (world.shut)
        pthread_cond_wait(&world.moved, &world.lock);
    pthread_mutex_unlock(&world.lock);
    world.n_append = 0;
    return fb_checkpoint_writer_new(out, m, order, dir, save_dtype, err);
}

static fb_status append_piece(fb_checkpoint_writer *w, uint32_t block, uint64_t first, uint64_t n, const fb_piece *piece,
                              fb_error *err)
{
    if (world.slow)
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    if (++world.n_append == world.fails_at)
        return fb_fail(err, FB_IO, "checkpoint: cannot be written: No space left on device");
    return fb_checkpoint_writer_append(w, block, first, n, piece, err);
}

#define FB_UPDATE_CHUNK 4096 /* small pieces, so that a small model has several; workers still take the library's, many at a time */
#define fb_checkpoint_writer_new open_files
#define fb_checkpoint_writer_append append_piece
#include "../../src/run/saver.c"
#undef FB_UPDATE_CHUNK
#undef fb_checkpoint_writer_new
#undef fb_checkpoint_writer_append

static void set_shut(bool shut)
{
    pthread_mutex_lock(&world.lock);
    world.shut = shut;
    pthread_cond_broadcast(&world.moved);
    pthread_mutex_unlock(&world.lock);
}

/* ---- runs ---- */

/* Blocks of several pieces and of one; 10 pieces in all. */
static const tiny_model model = { "qwen3", 16, 94, 3, 2, 1, 8, 625, true, NULL, 0 };
enum { WHOLE = 1000 * PIECE_BYTES };

static char out_dir[600];

static char *checkpoint(uint32_t step)
{
    static char dir[700];
    snprintf(dir, sizeof dir, "%s/checkpoint-%u", out_dir, step);
    return dir;
}

/* Options beside the defaults; none is NULL. */
typedef struct setting {
    const char *dtype, *clip, *placement, *passes, *backend;
} setting;

static void open_run(engine_rig *r, const setting *x)
{
    fb_error err;
    rig_options(r, (const char *const[]){ x->dtype, x->clip, x->placement, x->passes, x->backend, NULL });
    if (rig_start(r, &err) != FB_OK)
        fail_msg("%s", err.msg);
    snprintf(out_dir, sizeof out_dir, "%s/out", temp_dir);
}

static fb_saver *open_saver(engine_rig *r, uint64_t buffer_size)
{
    fb_error err;
    fb_saver *s;
    if (fb_saver_new(&s, &(fb_saver_options){ .state = &r->session.state, .output_dir = out_dir, .model_dir = temp_dir,
            .save_dtype = FB_BF16, .last_block_first = r->options.max_grad_norm == 0, .buffer_size = buffer_size,
            .team = r->session.team }, &err) != FB_OK)
        fail_msg("%s", err.msg);
    fb_engine_hooks hooks = fb_saver_hooks(s);
    fb_engine_set_hooks(r->session.engine, &hooks);
    return s;
}

static void begin(engine_rig *r, fb_saver *s, uint64_t step)
{
    fb_engine_settle(r->session.engine);
    fb_saver_begin(s, step, strdup("{\"a state\": 1}"));
}

static fb_status end(fb_saver *s, fb_error *err)
{
    fb_saver_report report;
    fb_status st = FB_FAILED;
    fb_saver_wait(s);
    assert_false(fb_saver_is_busy(s));
    assert_true(fb_saver_ended(s, &report, &st, err));
    assert_false(fb_saver_ended(s, &report, &st, err)); /* told once */
    return st;
}

static void step(engine_rig *r, uint32_t i)
{
    fb_error err;
    fb_step_result result;
    if (rig_step(r, i, 2, &result, &err) != FB_OK)
        fail_msg("%s", err.msg);
    assert_true(result.updated);
}

static void close_run(engine_rig *r, fb_saver *s)
{
    fb_engine_free(r->session.engine);
    r->session.engine = NULL;
    fb_saver_free(s);
    rig_stop(r);
}

static uint64_t size_of(const char *path)
{
    struct stat info;
    assert_int_equal(stat(path, &info), 0);
    return (uint64_t)info.st_size;
}

/* Both folders are whole and have the same files with the same bytes: a manifest has the size and sum of each. */
static void expect_same_folders(uint32_t a, uint32_t b)
{
    fb_error err;
    char *text[2];
    uint64_t size[2];
    for (int i = 0; i < 2; i++) {
        char path[800];
        if (fb_sums_verify(checkpoint(i ? b : a), &err) != FB_OK)
            fail_msg("%s", err.msg);
        snprintf(path, sizeof path, "%s/manifest.json", checkpoint(i ? b : a));
        assert_int_equal(fb_file_read(&text[i], &size[i], path, 1 << 20, NULL), FB_OK);
    }
    assert_int_equal(size[0], size[1]);
    assert_memory_equal(text[0], text[1], size[0]);
    free(text[0]);
    free(text[1]);
}

/* Steps 0, save, 1, 2 with nothing at home on the device; the save alone, waited for at once, as checkpoint-100. */
static void run_undisturbed(rig_outcome *want, const char *dtype, const char *clip)
{
    engine_rig r;
    fb_error err;
    open_run(&r, &(setting){ dtype, clip, "placement=stream", "passes=1", "backend=auto" });
    fb_saver *s = open_saver(&r, WHOLE);
    step(&r, 0);
    begin(&r, s, 100);
    assert_int_equal(end(s, &err), FB_OK);
    step(&r, 1);
    step(&r, 2);
    rig_take(want, &r);
    close_run(&r, s);
}

/* Training ended as it would have anyway, and the folder holds what a save that nobody disturbed leaves. */
static void expect_same_end(engine_rig *r, fb_saver *s, const rig_outcome *want, uint32_t number)
{
    fb_error err;
    rig_outcome got = { 0 };
    rig_take(&got, r);
    assert_int_equal(end(s, &err), FB_OK);
    assert_int_equal(s->n_free, s->buffer.size / PIECE_BYTES); /* all slots are back */
    assert_true(rig_same(want, &got));
    expect_same_folders(100, number);
    free(got.all);
}

/* The same with a save that training does not wait for, as checkpoint-STEP. */
static void run_disturbed(const rig_outcome *want, const setting *x, uint64_t buffer_size, uint32_t number)
{
    engine_rig r;
    fb_error err;
    rig_outcome got = { 0 };
    open_run(&r, x);
    fb_saver *s = open_saver(&r, buffer_size);
    step(&r, 0);
    begin(&r, s, number);
    step(&r, 1);
    step(&r, 2);
    rig_take(&got, &r);
    assert_int_equal(end(s, &err), FB_OK);
    assert_int_equal(s->n_free, s->buffer.size / PIECE_BYTES); /* all slots are back */
    if (!rig_same(want, &got))
        fail_msg("training ends otherwise: %s %s %s %s %s", x->dtype, x->clip, x->placement, x->passes, x->backend);
    expect_same_folders(100, number);
    free(got.all);
    close_run(&r, s);
}

static const char *const dtypes[] = { "compute_dtype=float32", "compute_dtype=bfloat16" };
static const char *const clips[] = { "max_grad_norm=1", "max_grad_norm=0" };
/* A step has two micro-batches: with passes=6 it has two passes. */
static const char *const placements[][2] = { { "placement=stream", "passes=1" }, { "placement=layers:2", "passes=6" },
                                             { "placement=resident", "passes=1" }, { "placement=resident", "passes=6" } };

static void reset(void)
{
    world.slow = world.shut = false;
    world.fails_at = 0;
}

/* ---- tests ---- */

static void training_goes_on_while_a_slow_disk_writes(void **unused)
{
    (void)unused;
    static const uint64_t buffers[] = { 0, 3 * PIECE_BYTES, WHOLE };
    reset();
    tiny_write(&model, 3);
    for (size_t k = SANITIZED; k < FB_COUNT(dtypes) * FB_COUNT(clips) - SANITIZED; k++) {
        rig_outcome want = { 0 };
        run_undisturbed(&want, dtypes[k / 2], clips[k % 2]);
        world.slow = true;
        for (uint32_t i = 0; i < FB_COUNT(buffers) * FB_COUNT(placements); i++) {
            const char *const *place = placements[i / FB_COUNT(buffers)];
            run_disturbed(&want, &(setting){ dtypes[k / 2], clips[k % 2], place[0], place[1], "backend=auto" },
                          buffers[i % FB_COUNT(buffers)], i);
        }
        world.slow = false;
        free(want.all);
    }
}

/* With room for everything, steps end although the disk does not write at all. */
static void room_for_all_needs_no_disk(void **unused)
{
    (void)unused;
    reset();
    tiny_write(&model, 4);
    for (size_t k = SANITIZED; k < FB_COUNT(dtypes) * FB_COUNT(clips) - SANITIZED; k++) {
        rig_outcome want = { 0 };
        run_undisturbed(&want, dtypes[k / 2], clips[k % 2]);
        for (size_t i = 0; i < FB_COUNT(placements); i++) {
            engine_rig r;
            fb_error err;
            rig_outcome got = { 0 };
            open_run(&r, &(setting){ dtypes[k / 2], clips[k % 2], placements[i][0], placements[i][1], "backend=auto" });
            fb_saver *s = open_saver(&r, WHOLE);
            step(&r, 0);
            set_shut(true);
            begin(&r, s, 1);
            step(&r, 1);
            step(&r, 2);
            rig_take(&got, &r);
            assert_true(fb_saver_is_busy(s));
            fb_saver_report none;
            fb_status st;
            assert_false(fb_saver_ended(s, &none, &st, &err));
            set_shut(false);
            assert_int_equal(end(s, &err), FB_OK);
            assert_true(rig_same(&want, &got));
            assert_true(s->report.waited == 0);
            assert_int_equal(s->n_free, fb_saver_buffer_most(s->manifest) / PIECE_BYTES); /* all slots are back */
            expect_same_folders(100, 1);
            free(got.all);
            close_run(&r, s);
        }
        free(want.all);
    }
}

/* Without room for it, an update waits for the disk: what is not saved is not changed. */
static void a_full_buffer_holds_updates_up(void **unused)
{
    (void)unused;
    reset();
    tiny_write(&model, 5);
    engine_rig r;
    rig_outcome want = { 0 };
    run_undisturbed(&want, dtypes[1], clips[0]);
    open_run(&r, &(setting){ dtypes[1], clips[0], "placement=stream", "passes=1", "backend=auto" });
    const fb_state *t = &r.session.state;
    uint32_t last = t->manifest->n_block - 1;
    uint64_t n = t->manifest->blocks[last].extent;
    float *before = malloc(n * sizeof *before), *after = malloc(n * sizeof *after);
    fb_saver *s = open_saver(&r, 2 * PIECE_BYTES);
    step(&r, 0);
    fb_engine_settle(r.session.engine);
    fb_state_read(t, last, 0, n, before);
    set_shut(true);
    begin(&r, s, 1);
    step(&r, 1);
    double since = fb_clock();
    for (bool waits = false; !waits;) {
        assert_true(fb_clock() - since < 60); /* a guard against waiting for ever */
        pthread_mutex_lock(&s->lock);
        waits = s->n_waiting == r.options.update_threads && !s->n_free;
        pthread_mutex_unlock(&s->lock);
    }
    fb_state_read(t, last, 0, n, after);
    assert_memory_equal(before, after, n * sizeof *before);
    set_shut(false);
    step(&r, 2);
    expect_same_end(&r, s, &want, 1);
    assert_true(s->report.waited > 0);
    free(before);
    free(after);
    free(want.all);
    close_run(&r, s);
}

/* Opens the disk once the engine's thread stands before an update on the device, with no slot left and something unsent. */
static void *open_when_full(void *arg)
{
    fb_saver *s = arg;
    double since = fb_clock();
    for (bool waits = false; !waits && fb_clock() - since < 60;) {
        pthread_mutex_lock(&s->lock);
        waits = s->n_waiting == 1 && !s->n_free && s->n_sent == 2;
        pthread_mutex_unlock(&s->lock);
    }
    set_shut(false);
    return NULL;
}

/* The same on the device, where it is the engine's thread that waits. */
static void a_full_buffer_holds_updates_on_the_device_up(void **unused)
{
    (void)unused;
    reset();
    tiny_write(&model, 5);
    for (size_t k = 0; k < FB_COUNT(clips); k++) {
        engine_rig r;
        rig_outcome want = { 0 };
        pthread_t opener;
        run_undisturbed(&want, dtypes[1], clips[k]);
        open_run(&r, &(setting){ dtypes[1], clips[k], "placement=resident", "passes=1", "backend=auto" });
        fb_saver *s = open_saver(&r, 2 * PIECE_BYTES);
        step(&r, 0);
        set_shut(true);
        begin(&r, s, 1);
        assert_int_equal(pthread_create(&opener, NULL, open_when_full, s), 0);
        step(&r, 1);
        assert_false(world.shut);
        pthread_join(opener, NULL);
        step(&r, 2);
        expect_same_end(&r, s, &want, 1);
        assert_true(s->report.waited > 0);
        free(want.all);
        close_run(&r, s);
    }
}

/* A disk that fails on the way: training is not held up, the half-written folder goes, the one before stays, the next save
 * works. */
static void a_failed_save_leaves_the_one_before(void **unused)
{
    (void)unused;
    static const uint64_t buffers[] = { 0, 3 * PIECE_BYTES };
    reset();
    tiny_write(&model, 6);
    for (size_t k = 0; k < FB_COUNT(clips); k++) {
        rig_outcome want = { 0 };
        run_undisturbed(&want, dtypes[1], clips[k]);
        for (size_t i = 0; i < FB_COUNT(buffers) * FB_COUNT(placements); i += 1 + 2 * SANITIZED)
            for (uint32_t piece = 1; piece < 10; piece += 4) {
                const char *const *place = placements[i / FB_COUNT(buffers)];
                engine_rig r;
                fb_error err;
                rig_outcome got = { 0 };
                open_run(&r, &(setting){ dtypes[1], clips[k], place[0], place[1], "backend=auto" });
                fb_saver *s = open_saver(&r, buffers[i % FB_COUNT(buffers)]);
                step(&r, 0);
                begin(&r, s, 1);
                assert_int_equal(end(s, &err), FB_OK);
                world.slow = true;
                world.fails_at = piece;
                begin(&r, s, 2);
                step(&r, 1);
                step(&r, 2);
                expect_failure(end(s, &err), FB_IO, &err, "No space left");
                reset();
                rig_take(&got, &r);
                assert_true(rig_same(&want, &got));
                assert_int_equal(access(checkpoint(2), F_OK), -1);
                assert_int_equal(access(temp_path("out/checkpoint-2.tmp"), F_OK), -1);
                expect_same_folders(100, 1);
                begin(&r, s, 3);
                assert_int_equal(end(s, &err), FB_OK);
                assert_int_equal(fb_sums_verify(checkpoint(3), NULL), FB_OK);
                free(got.all);
                close_run(&r, s);
            }
        free(want.all);
    }
}

/* ---- a device that is slow, and one that fails ---- */

/* A download that comes late, whichever it is, is still of the state before the update. */
static void downloads_may_come_late(void **unused)
{
    (void)unused;
    reset();
    tiny_write(&model, 7);
    for (size_t k = SANITIZED; k < FB_COUNT(dtypes) * FB_COUNT(clips) - SANITIZED; k++) {
        rig_outcome want = { 0 };
        run_undisturbed(&want, dtypes[k / 2], clips[k % 2]);
        for (uint32_t i = 0; i < 6; i++) {
            char backend[64];
            snprintf(backend, sizeof backend, i % 2 ? "backend=fault:delay=3000,seed=%u" : "backend=fault:slow=download:%u",
                     3 + 5 * i);
            const char *const *place = placements[1 + i % 3];
            run_disturbed(&want, &(setting){ dtypes[k / 2], clips[k % 2], place[0], place[1], backend },
                          i % 3 ? (uint64_t)WHOLE : 2 * PIECE_BYTES, i);
        }
        free(want.all);
    }
}

/* Whichever call fails, of the save's or of the step's: a step that failed says so, a save that failed leaves no folder, one that
 * did not is whole, and nobody hangs. */
static void a_device_that_fails_fails_the_save(void **unused)
{
    (void)unused;
    static const char *const calls[] = { "download", "call" };
    reset();
    tiny_write(&model, 8);
    uint32_t n_failed = 0;
    for (uint32_t i = 0; i < 40; i += 1 + 2 * SANITIZED) {
        char backend[64];
        engine_rig r;
        fb_error err, of_step;
        fb_step_result result;
        snprintf(backend, sizeof backend, "backend=fault:fail=%s:%u", calls[i % 4 == 3], 3 + (i % 4 == 3 ? i / 4 : i));
        open_run(&r, &(setting){ dtypes[1], clips[i % 2], placements[1 + i % 3][0], placements[1 + i % 3][1], backend });
        fb_saver *s = open_saver(&r, i % 5 ? 3 * PIECE_BYTES : (uint64_t)WHOLE);
        fb_status stepped = rig_step(&r, 0, 2, &result, &of_step);
        if (stepped == FB_OK) {
            begin(&r, s, 1 + i);
            stepped = rig_step(&r, 1, 2, &result, &of_step);
            fb_status saved = end(s, &err);
            n_failed += saved != FB_OK;
            if (saved != FB_OK) {
                expect_failure(saved, FB_DEVICE, &err, "injected failure");
                assert_int_equal(access(checkpoint(1 + i), F_OK), -1);
            } else
                assert_int_equal(fb_sums_verify(checkpoint(1 + i), &err), FB_OK);
        }
        if (stepped != FB_OK)
            expect_failure(stepped, FB_DEVICE, &of_step, "injected failure");
        close_run(&r, s);
    }
    assert_true(n_failed >= (SANITIZED ? 4 : 12));
}

/* The same where no step comes between: the wait for the save is what sends.  What works again saves again. */
static void a_wait_that_fails_fails_the_save(void **unused)
{
    (void)unused;
    static const char *const failures[] = { "download:1", "download:2", "download:17", "download:40", "call:1", "call:2" };
    reset();
    tiny_write(&model, 8);
    for (size_t i = 0; i < FB_COUNT(failures); i++) {
        char backend[64];
        engine_rig r;
        fb_error err;
        snprintf(backend, sizeof backend, "backend=fault:fail=%s", failures[i]);
        open_run(&r, &(setting){ dtypes[1], clips[i % 2], "placement=resident", "passes=1", backend });
        fb_saver *s = open_saver(&r, 5 * PIECE_BYTES);
        begin(&r, s, 1);
        expect_failure(end(s, &err), FB_DEVICE, &err, "injected failure");
        assert_int_equal(access(checkpoint(1), F_OK), -1);
        assert_int_equal(s->n_free, 5);
        begin(&r, s, 2);
        assert_int_equal(end(s, &err), FB_OK);
        assert_int_equal(fb_sums_verify(checkpoint(2), &err), FB_OK);
        close_run(&r, s);
    }
}

/* A device that fails later says so to the call behind the downloads. */
static void a_failed_call_fails_the_save(void **unused)
{
    (void)unused;
    reset();
    tiny_write(&model, 8);
    engine_rig r;
    fb_error err;
    open_run(&r, &(setting){ dtypes[1], clips[0], "placement=resident", "passes=1", "backend=auto" });
    fb_saver *s = open_saver(&r, WHOLE);
    set_shut(true);
    begin(&r, s, 1);
    pthread_mutex_lock(&s->lock);
    take_slot(s, 0);
    s->batches[0] = (batch){ s, 0, 1 };
    s->n_sent = 1;
    pthread_mutex_unlock(&s->lock);
    batch_landed(&s->batches[0], true);
    set_shut(false);
    expect_failure(end(s, &err), FB_DEVICE, &err, "the device failed");
    assert_int_equal(access(checkpoint(1), F_OK), -1);
    close_run(&r, s);
}

/* 12 bytes a parameter, and headers; a saver that is freed ends what it began. */
static void twelve_bytes_a_parameter(void **unused)
{
    (void)unused;
    static const char *const files[] = { "model", "remainders", "adam_m", "adam_v" };
    reset();
    tiny_write(&model, 9);
    engine_rig r;
    fb_error err;
    open_run(&r, &(setting){ dtypes[1], clips[0], "placement=resident", "passes=1", "backend=auto" });
    fb_saver *s = open_saver(&r, 0);
    uint64_t size = 0, n_weight = r.session.manifest.n_weight, n_param = r.session.manifest.n_param;
    begin(&r, s, 1);
    close_run(&r, s);
    assert_int_equal(fb_sums_verify(checkpoint(1), &err), FB_OK);
    for (size_t i = 0; i < FB_COUNT(files); i++) {
        char path[800];
        snprintf(path, sizeof path, "%s/%s.safetensors", checkpoint(1), files[i]);
        size += size_of(path);
    }
    assert_in_range(size, 12 * n_weight, 12 * n_weight + FB_COUNT(files) * n_param * 200);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, temp_dir_make, temp_dir_remove)
    const struct CMUnitTest tests[] = {
        TEST(training_goes_on_while_a_slow_disk_writes),
        TEST(room_for_all_needs_no_disk),
        TEST(a_full_buffer_holds_updates_up),
        TEST(a_full_buffer_holds_updates_on_the_device_up),
        TEST(a_failed_save_leaves_the_one_before),
        TEST(downloads_may_come_late),
        TEST(a_device_that_fails_fails_the_save),
        TEST(a_wait_that_fails_fails_the_save),
        TEST(a_failed_call_fails_the_save),
        TEST(twelve_bytes_a_parameter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
