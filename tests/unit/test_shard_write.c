/* Oracles: the reader, the format's own rules on the raw bytes, and the index as save_pretrained writes it. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "io/shard_write.h"
#include "temp_dir.h"

/* The test's own `err` takes the sentence. */
#define OK(call)                                                                                                       \
    do {                                                                                                               \
        if ((call) != FB_OK)                                                                                           \
            fail_msg("%s: %s", #call, err.msg);                                                                        \
    } while (0)

enum { N_TENSOR = 5 };

static const struct {
    const char *name;
    fb_dtype    dtype;
    uint32_t    rank;
    uint64_t    shape[3], size;
} tensors[N_TENSOR] = {
    { "w.a", FB_BF16, 2, { 3, 5 }, 30 },     { "w.\"b\"", FB_F32, 1, { 4 }, 16 }, { "w.none", FB_F16, 2, { 0, 4 }, 0 },
    { "w.c", FB_F16, 3, { 1, 2, 7 }, 28 }, { "w.d", FB_F32, 0, { 0 }, 4 },
};

static fb_shard_writer *declared(uint64_t shard_size_max)
{
    fb_error err = { 0 };
    fb_shard_writer *w = NULL;
    OK(fb_shard_writer_new(&w, temp_dir, "model", shard_size_max, &err));
    for (int i = 0; i < N_TENSOR; i++)
        OK(fb_shard_writer_declare(w, tensors[i].name, tensors[i].dtype, tensors[i].rank, tensors[i].shape, &err));
    return w;
}

/* Byte k of the whole stream is a function of k alone. */
static unsigned char byte_at(uint64_t k)
{
    return (unsigned char)(k * 37 + 11);
}

enum { TOTAL = 78 };

static void save(uint64_t shard_size_max, uint64_t piece)
{
    fb_error err = { 0 };
    fb_shard_writer *w = declared(shard_size_max);
    unsigned char    bytes[TOTAL];
    for (uint64_t k = 0; k < TOTAL; k++)
        bytes[k] = byte_at(k);
    for (uint64_t k = 0; k < TOTAL; k += piece)
        OK(fb_shard_writer_append(w, bytes + k, k + piece < TOTAL ? piece : TOTAL - k, &err));
    OK(fb_shard_writer_finish(w, &err));
}

static void check_saved(void)
{
    fb_error err = { 0 };
    fb_shard_set *s = NULL;
    OK(fb_shard_set_open(&s, temp_dir, &err));
    assert_int_equal(fb_shard_set_count(s), N_TENSOR);
    uint64_t k = 0;
    for (int i = 0; i < N_TENSOR; i++) {
        const fb_tensor *t = fb_shard_set_find(s, tensors[i].name);
        assert_non_null(t);
        assert_int_equal(t->dtype, tensors[i].dtype);
        assert_int_equal(t->rank, tensors[i].rank);
        assert_memory_equal(t->shape, tensors[i].shape, t->rank * sizeof *t->shape);
        assert_int_equal(t->size, tensors[i].size);
        assert_int_equal(t->offset % fb_dtype_size(t->dtype), 0); /* readers that view in place need it */
        unsigned char bytes[TOTAL];
        OK(fb_tensor_read(t, 0, t->size / fb_dtype_size(t->dtype), bytes, &err));
        for (uint64_t b = 0; b < t->size; b++)
            assert_int_equal(bytes[b], byte_at(k++));
    }
    fb_shard_set_close(s);
}

static bool present(const char *name)
{
    return access(temp_path(name), F_OK) == 0;
}

static void one_shard_in_pieces_of_any_size(void **unused)
{
    (void)unused;
    fb_error err = { 0 };
    for (uint64_t piece = 1; piece <= TOTAL; piece += 11) {
        save(1000, piece);
        check_saved();
        assert_true(present("model.safetensors"));
        assert_false(present("model.safetensors.index.json"));
        assert_false(present("model.safetensors.tmp"));
    }
    char    *file;
    uint64_t size, header;
    OK(fb_file_read(&file, &size, temp_path("model.safetensors"), 10000, &err));
    memcpy(&header, file, 8);
    assert_int_equal(header % 8, 0); /* spaces pad the header, so the data start aligned */
    assert_int_equal(size, 8 + header + TOTAL);
    assert_memory_equal(file + 8, "{\"__metadata__\":{\"format\":\"pt\"},", 32);
    free(file);
}

/* Cuts by bytes: a 30 + b 16 + none 0, then c 28 + d 4: the limit of 46 is reached but not passed. */
static void several_shards_with_an_index(void **unused)
{
    (void)unused;
    fb_error err = { 0 };
    save(46, 7);
    check_saved();
    char    *index;
    uint64_t size;
    OK(fb_file_read(&index, &size, temp_path("model.safetensors.index.json"), 10000, &err));
    assert_string_equal(index, "{\n"
                               "  \"metadata\": {\n"
                               "    \"total_size\": 78\n"
                               "  },\n"
                               "  \"weight_map\": {\n"
                               "    \"w.\\\"b\\\"\": \"model-00001-of-00002.safetensors\",\n"
                               "    \"w.a\": \"model-00001-of-00002.safetensors\",\n"
                               "    \"w.c\": \"model-00002-of-00002.safetensors\",\n"
                               "    \"w.d\": \"model-00002-of-00002.safetensors\",\n"
                               "    \"w.none\": \"model-00001-of-00002.safetensors\"\n"
                               "  }\n"
                               "}");
    free(index);
    save(1, 78); /* every tensor is larger than the limit: a shard each, as nothing joins one that is too full */
    check_saved();
}

static void an_earlier_save_does_not_linger(void **unused)
{
    (void)unused;
    save(1000, 78);
    temp_write_text("model-card.safetensors", "not a shard");
    temp_write_text("other-00001-of-00002.safetensors", "not ours");
    save(46, 78);
    assert_false(present("model.safetensors"));
    assert_true(present("model-00001-of-00002.safetensors"));
    check_saved();
    save(20, 78);
    assert_false(present("model-00001-of-00002.safetensors"));
    check_saved();
    save(1000, 78);
    assert_false(present("model.safetensors.index.json"));
    assert_false(present("model-00001-of-00004.safetensors"));
    check_saved();
    assert_true(present("model-card.safetensors"));
    assert_true(present("other-00001-of-00002.safetensors"));
}

/* Abandoned or failed, a save leaves what was there before, and nothing else. */
static void a_dropped_save_changes_nothing(void **unused)
{
    (void)unused;
    fb_error err = { 0 };
    save(1000, 78);
    fb_shard_writer *w = declared(46);
    OK(fb_shard_writer_append(w, "0123456789012345678901234567890123456789012345678", 49, &err));
    assert_true(present("model-00002-of-00002.safetensors.tmp"));
    fb_shard_writer_abandon(w);
    assert_false(present("model-00001-of-00002.safetensors.tmp"));
    assert_false(present("model-00002-of-00002.safetensors.tmp"));
    check_saved();

    w = declared(1000);
    OK(fb_shard_writer_append(w, "0123456789", 10, &err));
    expect_failure(fb_shard_writer_finish(w, &err), FB_FAILED, &err, "'w.a' got 10 of its 30 bytes");
    assert_false(present("model.safetensors.tmp"));
    check_saved();
    fb_shard_writer_abandon(NULL);
}

static void failures_have_sentences(void **unused)
{
    (void)unused;
    fb_error         err = { 0 };
    fb_shard_writer *w = NULL;
    uint64_t         one = 1, huge[2] = { UINT64_MAX, 2 };
    OK(fb_shard_writer_new(&w, temp_path("nowhere"), "model", 9, &err));
    OK(fb_shard_writer_declare(w, "a", FB_F32, 1, &one, &err));
    expect_failure(fb_shard_writer_append(w, "1234", 4, &err), FB_IO, &err, "cannot be created");
    fb_shard_writer_abandon(w);

    OK(fb_shard_writer_new(&w, temp_dir, "model", 9, &err));
    expect_failure(fb_shard_writer_declare(w, "a", FB_F32, 2, huge, &err), FB_FAILED, &err, "overflows 64 bits");
    OK(fb_shard_writer_declare(w, "a", FB_F32, 1, &one, &err));
    OK(fb_shard_writer_declare(w, "a", FB_F32, 1, &one, &err));
    expect_failure(fb_shard_writer_append(w, "1234", 4, &err), FB_FAILED, &err, "'a' was declared twice");
    fb_shard_writer_abandon(w);
}

static void nothing_declared_is_an_empty_file(void **unused)
{
    (void)unused;
    fb_error err = { 0 };
    fb_shard_writer *w = NULL;
    fb_shard_set    *s = NULL;
    OK(fb_shard_writer_new(&w, temp_dir, "model", 9, &err));
    OK(fb_shard_writer_finish(w, &err));
    OK(fb_shard_set_open(&s, temp_dir, &err));
    assert_int_equal(fb_shard_set_count(s), 0);
    fb_shard_set_close(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(one_shard_in_pieces_of_any_size, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(several_shards_with_an_index, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(an_earlier_save_does_not_linger, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(a_dropped_save_changes_nothing, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(failures_have_sentences, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(nothing_declared_is_an_empty_file, temp_dir_make, temp_dir_remove),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
