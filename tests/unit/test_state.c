/* The host state: what is mapped, what a load puts there, what read and write do to the bits. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "temp_dir.h"
#include "tiny_model.h"
#include "train/micro.h"
#include "train/state.h"

static const tiny_model model = { "qwen3", 24, 40, 2, 4, 2, 6, 70, true, NULL, 0 };

static fb_device *device;
static fb_team *team;

static int open_all(void **state)
{
    (void)state;
    return temp_dir_make(NULL) || fb_team_new(&team, 2, "test", NULL)
        || fb_device_open(&device, &(fb_device_options){ .backend = "cpu", .n_thread = 1 }, NULL) ? -1 : 0;
}

static int close_all(void **state)
{
    (void)state;
    device->ops->close(device);
    fb_team_free(team);
    return temp_dir_remove(NULL);
}

typedef struct setting {
    fb_dtype act;
    bool     train, clip;
} setting;

static void make_state(fb_state *s, fb_manifest *m, fb_plan *p, const setting *x)
{
    fb_error err;
    tiny_manifest(m, &model);
    fb_plan_request r = { .manifest = m, .act = x->act, .train = x->train, .clip = x->clip, .row_len = 8,
                          .micro_rows = 1, .n_micro = 1, .meta_size = fb_micro_size,
                          .attention_scratch = device->kernels->attention_scratch };
    fb_layout l = { .n_pass = 1, .slots = 1 };
    if (fb_plan_build(p, &r, &l, &err) != FB_OK || fb_state_init(s, m, p, NULL, device, team, &err) != FB_OK)
        fail_msg("%s", err.msg);
}

static void maps_what_the_plan_sizes(void **unused)
{
    (void)unused;
    for (int bits = 0; bits < 8; bits++) {
        setting x = { bits & 1 ? FB_BF16 : FB_F32, bits & 2, bits & 4 };
        fb_manifest m;
        fb_plan p;
        fb_state s;
        make_state(&s, &m, &p, &x);
        for (fb_plan_host_region c = FB_HOST_WEIGHTS; c <= FB_HOST_ACCUMULATORS; c++) {
            assert_int_equal(s.component[c].at != NULL, p.host[c].size != 0);
            if (!s.component[c].at)
                continue;
            assert_true(s.component[c].size >= p.host[c].size && s.component[c].size < p.host[c].size + 4096);
            assert_ptr_equal(fb_state_at(&s, c, 0, 0), s.component[c].at);
            assert_ptr_equal((unsigned char *)fb_state_at(&s, c, m.n_block - 1, m.blocks[m.n_block - 1].extent),
                             s.component[c].at + p.host[c].size); /* the blocks fill it exactly */
            for (uint64_t i = 0; i < p.host[c].size; i++)
                assert_int_equal(s.component[c].at[i], 0);
        }
        assert_int_equal(s.base[m.n_block], m.extent);
        fb_state_deinit(&s);
        fb_state_deinit(&s);
        fb_manifest_free(&m);
    }
}

static fb_shard_set *open_shards(void)
{
    fb_shard_set *set;
    fb_error err;
    if (fb_shard_set_open(&set, temp_dir, &err) != FB_OK)
        fail_msg("%s", err.msg);
    return set;
}

/* Every weight of the file at its place; bfloat16 keeps the exact float32, and its upper half is the nearest bfloat16. */
static void a_load_is_the_file(void **unused)
{
    (void)unused;
    tiny_write(&model, 11);
    for (int bits = 0; bits < 4; bits++) {
        setting x = { bits & 1 ? FB_BF16 : FB_F32, bits & 2, true };
        fb_manifest m;
        fb_plan p;
        fb_state s;
        fb_shard_set *set = open_shards();
        make_state(&s, &m, &p, &x);
        assert_int_equal(fb_state_load(&s, set, team, NULL), FB_OK);
        uint64_t n_seen = 0;
        for (uint32_t i = 0; i < m.n_param; i++) {
            const fb_param *q = &m.params[i];
            uint64_t n = q->rows * q->cols;
            float got[3000], file[3000];
            fb_state_read(&s, q->block, q->offset, n, got);
            assert_int_equal(fb_tensor_read(fb_shard_set_find(set, q->name), 0, n, file, NULL), FB_OK);
            for (uint64_t k = 0; k < n; k++) {
                float want = file[k];
                if (x.act == FB_F32 || x.train)
                    assert_true(fb_f32_bits(got[k]) == fb_f32_bits(want));
                else { /* nearest, ties away: the half of what is cut off, added */
                    uint32_t bits32 = (fb_f32_bits(want) + 0x8000u) & 0xffff0000u;
                    assert_true(fb_f32_bits(got[k]) == bits32);
                }
            }
            n_seen += n;
        }
        assert_int_equal(n_seen, m.n_weight);
        /* What is no parameter is still zero. */
        uint64_t zeros = 0;
        const void *weights = s.component[FB_HOST_WEIGHTS].at;
        for (uint64_t k = 0; k < m.extent; k++)
            zeros += x.act == FB_F32 ? ((const uint32_t *)weights)[k] == 0 : ((const uint16_t *)weights)[k] == 0;
        assert_int_equal(zeros, m.extent - m.n_weight);
        fb_state_deinit(&s);
        fb_shard_set_close(set);
        fb_manifest_free(&m);
    }
}

/* Evaluation sees what training would: the working weights of both are the same bits. */
static void forward_only_has_the_same_working_weights(void **unused)
{
    (void)unused;
    tiny_write(&model, 12);
    fb_manifest m[2];
    fb_plan p[2];
    fb_state s[2];
    for (int train = 0; train < 2; train++) {
        fb_shard_set *set = open_shards();
        make_state(&s[train], &m[train], &p[train], &(setting){ FB_BF16, train, false });
        assert_int_equal(fb_state_load(&s[train], set, team, NULL), FB_OK);
        fb_shard_set_close(set);
    }
    assert_memory_equal(s[0].component[FB_HOST_WEIGHTS].at, s[1].component[FB_HOST_WEIGHTS].at, 2 * m[0].extent);
    assert_null(s[0].component[FB_HOST_REMAINDERS].at);
    for (int train = 0; train < 2; train++) {
        fb_state_deinit(&s[train]);
        fb_manifest_free(&m[train]);
    }
}

static void write_then_read_is_exact(void **unused)
{
    (void)unused;
    enum { N = 700 };
    uint64_t seed = 5;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        fb_manifest m;
        fb_plan p;
        fb_state s;
        float in[N], out[N], left, right;
        make_state(&s, &m, &p, &(setting){ bf16 ? FB_BF16 : FB_F32, true, false });
        for (int i = 0; i < N; i++)
            do
                in[i] = fb_bits_f32((uint32_t)random_bits(&seed));
            while (!isfinite(in[i]) || fabsf(in[i]) > 3e38f);
        in[0] = -0.0f, in[1] = 1e-45f, in[2] = fb_bits_f32(0x3f808000u), in[3] = fb_bits_f32(0xbf807fffu);
        fb_state_write(&s, 1, 13, N, in);
        fb_state_read(&s, 1, 13, N, out);
        assert_memory_equal(in, out, sizeof in);
        fb_state_read(&s, 1, 12, 1, &left);
        fb_state_read(&s, 1, 13 + N, 1, &right);
        assert_true(left == 0 && right == 0);
        fb_state_deinit(&s);
        fb_manifest_free(&m);
    }
}

static void a_weight_that_is_not_finite_is_named(void **unused)
{
    (void)unused;
    static const uint32_t bad[] = { 0x7f800000u, 0xff800000u, 0x7fc00000u };
    fb_manifest m;
    tiny_manifest(&m, &model);
    for (size_t b = 0; b < FB_COUNT(bad); b++)
        for (uint32_t i = 0; i < m.n_param; i += 5) {
            const fb_param *q = &m.params[i];
            uint64_t element = q->rows * q->cols - 1 - b;
            tiny_write(&model, 13);
            fb_shard_set *set = open_shards();
            const fb_tensor *t = fb_shard_set_find(set, q->name);
            char *file;
            uint64_t size;
            fb_error err;
            assert_int_equal(fb_file_read(&file, &size, temp_path("model.safetensors"), 1 << 20, &err), FB_OK);
            uint64_t at = t->offset + 4 * element;
            memcpy(file + at, &bad[b], 4);
            memcpy(file + at + 4 < file + size ? file + at + 4 : file + at, &bad[b], 4); /* a later one is not the one named */
            fb_shard_set_close(set);
            temp_write("model.safetensors", file, size);
            free(file);

            fb_manifest other;
            fb_plan p;
            fb_state s;
            char part[256];
            set = open_shards();
            make_state(&s, &other, &p, &(setting){ FB_F32, true, false });
            snprintf(part, sizeof part, "model.safetensors: '%s' is not finite at element %llu", q->name,
                     (unsigned long long)element);
            expect_failure(fb_state_load(&s, set, team, &err), FB_INPUT, &err, part);
            fb_state_deinit(&s);
            fb_manifest_free(&other);
            fb_shard_set_close(set);
        }
    fb_manifest_free(&m);
}

/* Between open and load, at every tensor: the sentence says of which one how much is missing. */
static void a_shard_cut_behind_our_back_is_a_sentence(void **unused)
{
    (void)unused;
    tiny_write(&model, 14);
    fb_shard_set *set = open_shards();
    for (uint32_t k = fb_shard_set_count(set); k-- > 0;) { /* the last first; the file is in the manifest's order */
        const fb_tensor *t = fb_shard_set_at(set, k);
        char part[256];
        fb_error err;
        fb_manifest m;
        fb_plan p;
        fb_state s;
        assert_int_equal(truncate(temp_path("model.safetensors"), (off_t)(t->offset + t->size / 2)), 0);
        make_state(&s, &m, &p, &(setting){ k % 2 ? FB_F32 : FB_BF16, true, false });
        snprintf(part, sizeof part, "model.safetensors: became shorter while it was being read: '%s' has %llu bytes, %llu of them "
                 "are left; put the file back", t->name, (unsigned long long)t->size, (unsigned long long)(t->size / 2));
        expect_failure(fb_state_load(&s, set, team, &err), FB_IO, &err, part);
        assert_int_equal(fb_state_load(&s, set, team, NULL), FB_IO);
        fb_state_deinit(&s);
        fb_manifest_free(&m);
    }
    fb_shard_set_close(set);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(maps_what_the_plan_sizes),
        cmocka_unit_test(a_load_is_the_file),
        cmocka_unit_test(forward_only_has_the_same_working_weights),
        cmocka_unit_test(write_then_read_is_exact),
        cmocka_unit_test(a_weight_that_is_not_finite_is_named),
        cmocka_unit_test(a_shard_cut_behind_our_back_is_a_sentence),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
