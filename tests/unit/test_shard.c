/* Files are spelled out byte by byte after the safetensors README, so that no code of ours is its own oracle. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "io/shard.h"
#include "io/sys.h"
#include "temp_dir.h"

/* Length, header, then data bytes 0, 1, 2, ... */
static void write_shard(const char *name, uint64_t claimed, const char *header, size_t n_data)
{
    static unsigned char file[1 << 16];
    size_t               length = strlen(header);
    assert_true(8 + length + n_data <= sizeof file);
    memcpy(file, &claimed, 8);
    memcpy(file + 8, header, length);
    for (size_t i = 0; i < n_data; i++)
        file[8 + length + i] = (unsigned char)i;
    temp_write(name, file, 8 + length + n_data);
}

static void reads_a_file(void **unused)
{
    (void)unused;
    const char *header = "{\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[4,16]},"
                         "\"__metadata__\":{\"format\":\"pt\"},"
                         "\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
                         "\"none\":{\"dtype\":\"F16\",\"shape\":[0,7],\"data_offsets\":[16,16]}}   ";
    fb_error    err = { 0 };
    fb_shard   *s = NULL;
    write_shard("m", strlen(header), header, 16);
    if (fb_shard_open(&s, temp_path("m"), &err) != FB_OK)
        fail_msg("%s", err.msg);
    assert_int_equal(fb_shard_count(s), 3);
    assert_string_equal(fb_shard_at(s, 0)->name, "a");
    assert_string_equal(fb_shard_at(s, 1)->name, "b");
    assert_string_equal(fb_shard_at(s, 2)->name, "none");
    assert_null(fb_shard_at(s, 3));
    const fb_tensor *b = fb_shard_find(s, "b");
    assert_ptr_equal(b, fb_shard_at(s, 1));
    assert_int_equal(b->dtype, FB_BF16);
    assert_int_equal(b->rank, 2);
    assert_int_equal(b->shape[0], 2);
    assert_int_equal(b->shape[1], 3);
    assert_int_equal(b->size, 12);
    unsigned char bytes[12];
    float         wide[6];
    assert_int_equal(b->offset, 8 + strlen(header) + 4);
    assert_int_equal(fb_tensor_read(b, 0, 6, bytes, &err), FB_OK);
    for (int i = 0; i < 12; i++)
        assert_int_equal(bytes[i], 4 + i);
    assert_int_equal(fb_tensor_read(b, 4, 2, bytes, &err), FB_OK);
    assert_int_equal(bytes[0], 4 + 8);
    assert_int_equal(fb_tensor_read_f32(b, 1, 5, wide, &err), FB_OK);
    assert_int_equal(fb_f32_bits(wide[0]), 0x07060000);
    assert_int_equal(fb_f32_bits(wide[4]), 0x0f0e0000);
    assert_int_equal(fb_shard_find(s, "a")->rank, 0);
    assert_int_equal(fb_shard_find(s, "a")->size, 4);
    assert_int_equal(fb_shard_find(s, "none")->size, 0);
    assert_null(fb_shard_find(s, "c"));
    assert_string_equal(fb_shard_metadata(s, "format"), "pt");
    assert_null(fb_shard_metadata(s, "other"));
    assert_string_equal(fb_shard_path(s), temp_path("m"));
    fb_shard_close(s);
    fb_shard_close(NULL);
}

#define T(name, dtype, shape, offsets) "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static void refuses_each_malformed_file(void **unused)
{
    (void)unused;
    enum { EXACT = 0 };
    static const struct {
        uint64_t    claimed; /* EXACT: the header's length */
        const char *header;
        size_t      n_data;
        const char *part; /* of the sentence */
    } cases[] = {
        { 500, "{" T("a", "F32", "[1]", "[0,4]") "}", 4, "claims a header of 500 bytes but holds only" },
        { 100000001, "{}", 0, "claims a header of 100000001 bytes, at most 100000000" },
        { UINT64_MAX, "{}", 0, "claims a header of 18446744073709551615 bytes" },
        { EXACT, "{\"a\":nonsense}", 0, "the header is not JSON" },
        { EXACT, "{\"a\":1} trailing", 0, "the header is not JSON" },
        { EXACT, "[1, 2]", 0, "is not a JSON object" },
        { EXACT, " {}", 0, "does not begin with '{'" },
        { EXACT, "{\"a\":\"\xff\"}", 0, "the header is not JSON" },
        { EXACT, "{" T("a", "F32", "[1]", "[0,4]") "," T("a", "F32", "[1]", "[4,8]") "}", 8, "'a' stands twice" },
        { EXACT, "{\"a\":7}", 0, "the entry of tensor 'a' is not an object" },
        { EXACT, "{" T("a", "F32", "[2]", "[0,8]") "," T("b", "F32", "[1]", "[4,8]") "}", 8, "tensors 'a' and 'b' overlap" },
        { EXACT, "{" T("a", "F32", "[1]", "[0,4]") "," T("b", "F32", "[1]", "[0,4]") "}", 4, "tensors 'a' and 'b' overlap" },
        { EXACT, "{" T("a", "F32", "[1]", "[0,4]") "," T("b", "F32", "[1]", "[6,10]") "}", 10, "2 bytes before tensor 'b'" },
        { EXACT, "{" T("a", "F32", "[1]", "[4,8]") "}", 8, "4 bytes before tensor 'a'" },
        { EXACT, "{" T("a", "F32", "[1]", "[0,4]") "}", 7, "3 bytes at the end belong to no tensor" },
        { EXACT, "{}", 3, "3 bytes at the end" },
        { EXACT, "{" T("a", "F32", "[1]", "[4,0]") "}", 8, "tensor 'a' ends at 0, before its start at 4" },
        { EXACT, "{" T("a", "F32", "[2]", "[0,8]") "}", 7, "tensor 'a' ends at byte 8 of the data, the file holds 7" },
        { EXACT, "{" T("a", "F32", "[2]", "[0,9223372036854775807]") "}", 8, "ends at byte 9223372036854775807" },
        { EXACT, "{" T("a", "BF16", "[3]", "[0,4]") "}", 4, "has 4 bytes of data, its dtype and shape need 6" },
        { EXACT, "{" T("a", "F32", "[4294967296,4294967296]", "[0,0]") "}", 0, "more bytes than 64 bits can count" },
        { EXACT, "{" T("a", "F32", "[9223372036854775807,4]", "[0,0]") "}", 0, "more bytes than 64 bits can count" },
        { EXACT, "{" T("a", "F31", "[1]", "[0,4]") "}", 4, "has the unknown dtype 'F31'" },
        { EXACT, "{" T("a", "I64", "[1]", "[0,8]") "}", 8, "tensor 'a' is I64; forebay reads F32, F16 and BF16" },
        { EXACT, "{\"a\":{\"shape\":[],\"data_offsets\":[0,4]}}", 4, "tensor 'a' has no dtype" },
        { EXACT, "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "tensor 'a' has no shape" },
        { EXACT, "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "the data_offsets of tensor 'a'" },
        { EXACT, "{" T("a", "F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", 4, "has 9 dimensions, at most 8" },
        { EXACT, "{" T("a", "F32", "[-1]", "[0,4]") "}", 4, "dimension 0 of tensor 'a'" },
        { EXACT, "{" T("a", "F32", "[1,1.0]", "[0,4]") "}", 4, "dimension 1 of tensor 'a'" },
        { EXACT, "{" T("a", "F32", "[1]", "[-4,0]") "}", 4, "the data_offsets of tensor 'a'" },
        { EXACT, "{" T("a", "F32", "[1]", "[0,4.0]") "}", 4, "the data_offsets of tensor 'a'" },
        { EXACT, "{" T("a", "F32", "[1]", "[0,4,8]") "}", 4, "the data_offsets of tensor 'a'" },
        { EXACT, "{\"__metadata__\":{\"n\":1}}", 0, "__metadata__ key 'n' is not a string" },
        { EXACT, "{\"__metadata__\":[]}", 0, "__metadata__ is not an object" },
        { EXACT, "{\"\\u001b[2J\":7}", 0, "the entry of tensor '?[2J'" },
    };
    for (size_t i = 0; i < FB_COUNT(cases); i++) {
        fb_error  err = { 0 };
        fb_shard *s = NULL;
        write_shard("bad.safetensors", cases[i].claimed ? cases[i].claimed : strlen(cases[i].header), cases[i].header,
                    cases[i].n_data);
        expect_failure(fb_shard_open(&s, temp_path("bad.safetensors"), &err), FB_INPUT, &err, cases[i].part);
        assert_non_null(strstr(err.msg, "bad.safetensors: "));
        assert_null(s);
    }
}

static void refuses_what_is_no_file(void **unused)
{
    (void)unused;
    fb_error  err = { 0 };
    fb_shard *s = NULL;
    expect_failure(fb_shard_open(&s, temp_path("none"), &err), FB_INPUT, &err, "there is no such file");
    expect_failure(fb_shard_open(&s, temp_dir, &err), FB_INPUT, &err, "is a folder");
    temp_write("empty", "", 0);
    expect_failure(fb_shard_open(&s, temp_path("empty"), &err), FB_INPUT, &err, "is empty");
    temp_write("short", "123456789", 9);
    expect_failure(fb_shard_open(&s, temp_path("short"), &err), FB_INPUT, &err, "is 9 bytes long");
}

/* Every cut of a good file is refused, and none is read past its end (run under the address sanitizer too). */
static void refuses_every_truncation(void **unused)
{
    (void)unused;
    const char *header = "{" T("a", "F32", "[2]", "[0,8]") "," T("b", "F16", "[1,2]", "[8,12]") "}";
    uint64_t    length = strlen(header), total = 8 + length + 12;
    fb_error    err;
    fb_shard   *s = NULL;
    write_shard("m", length, header, 12);
    assert_int_equal(fb_shard_open(&s, temp_path("m"), &err), FB_OK);
    fb_shard_close(s);
    while (total-- > 0) {
        s = NULL;
        assert_int_equal(truncate(temp_path("m"), (off_t)total), 0);
        assert_int_equal(fb_shard_open(&s, temp_path("m"), &err), FB_INPUT);
        assert_null(s);
    }
}

/* Made shorter behind our back: what is still there can be read, and of the rest the sentence says how much is missing. */
static void a_file_that_becomes_shorter_is_a_sentence(void **unused)
{
    (void)unused;
    const char *header = "{" T("a", "F32", "[2]", "[0,8]") "," T("b", "F16", "[6]", "[8,20]") "}";
    uint64_t    length = strlen(header), body = 8 + length;
    fb_error    err;
    fb_shard   *s = NULL;
    float       wide[6];
    uint16_t    half[6];
    write_shard("m", length, header, 20);
    assert_int_equal(fb_shard_open(&s, temp_path("m"), &err), FB_OK);
    const fb_tensor *a = fb_shard_find(s, "a"), *b = fb_shard_find(s, "b");
    assert_int_equal(truncate(temp_path("m"), (off_t)(body + 13)), 0);
    assert_int_equal(fb_tensor_read_f32(a, 0, 2, wide, &err), FB_OK);
    assert_int_equal(fb_tensor_read(b, 0, 2, half, &err), FB_OK);
    for (uint64_t first = 0; first < 6; first++) /* whichever part is missed first */
        expect_failure(fb_tensor_read_f32(b, first, 6 - first, wide, &err), FB_IO, &err,
                       "m: became shorter while it was being read: 'b' has 12 bytes, 5 of them are left; put the file back");
    assert_int_equal(truncate(temp_path("m"), 3), 0);
    expect_failure(fb_tensor_read(a, 1, 1, wide, &err), FB_IO, &err, "'a' has 8 bytes, 0 of them are left");
    assert_int_equal(fb_tensor_read(b, 0, 0, half, &err), FB_OK);
    fb_shard_close(s);
}

static void a_read_that_fails_is_a_sentence(void **unused)
{
    (void)unused;
    fb_error  err;
    fb_shard *s = NULL;
    float     f[2];
    write_shard("m", strlen("{" T("a", "F32", "[2]", "[0,8]") "}"), "{" T("a", "F32", "[2]", "[0,8]") "}", 8);
    assert_int_equal(fb_shard_open(&s, temp_path("m"), &err), FB_OK);
    const fb_tensor *a = fb_shard_find(s, "a");
    assert_int_equal(fb_sys_faults("fail=read:2:EIO,short=read:1", &err), FB_OK);
    fb_status st = fb_tensor_read(a, 0, 2, f, &err);
    assert_int_equal(fb_sys_faults("fail=read:1:EINTR,short=read:2", NULL), FB_OK);
    fb_status again = fb_tensor_read(a, 0, 2, f, NULL);
    assert_int_equal(fb_sys_faults(NULL, NULL), FB_OK);
    char part[64];
    snprintf(part, sizeof part, "cannot be read at byte %d, in 'a': Input/output error", (int)a->offset + 4);
    expect_failure(st, FB_IO, &err, part);
    assert_int_equal(again, FB_OK);
    assert_int_equal(fb_f32_bits(f[1]), 0x07060504);
    fb_shard_close(s);
}

#define ONE(name) "{" T(name, "F32", "[1]", "[0,4]") "}"

static void write_two_shards(void)
{
    write_shard("one.safetensors", strlen(ONE("a")), ONE("a"), 4);
    write_shard("two.safetensors", strlen(ONE("b")), ONE("b"), 4);
}

static void a_set_is_what_the_index_names(void **unused)
{
    (void)unused;
    fb_error      err = { 0 };
    fb_shard_set *s = NULL;
    write_two_shards();
    temp_write_text("model.safetensors.index.json", "{\"metadata\":{\"total_size\":8},"
                                                    "\"weight_map\":{\"b\":\"two.safetensors\",\"a\":\"one.safetensors\"}}");
    if (fb_shard_set_open(&s, temp_dir, &err) != FB_OK)
        fail_msg("%s", err.msg);
    assert_int_equal(fb_shard_set_count(s), 2);
    const fb_tensor *b = fb_shard_set_find(s, "b");
    assert_ptr_equal(fb_shard_set_at(s, 1), b);
    assert_null(fb_shard_set_at(s, 2));
    assert_string_equal(fb_shard_path(b->shard), temp_path("two.safetensors"));
    assert_null(fb_shard_set_find(s, "c"));
    fb_shard_set_close(s);

    s = NULL; /* a single file comes first, as in transformers */
    write_shard("model.safetensors", strlen(ONE("c")), ONE("c"), 4);
    assert_int_equal(fb_shard_set_open(&s, temp_dir, &err), FB_OK);
    assert_int_equal(fb_shard_set_count(s), 1);
    assert_non_null(fb_shard_set_find(s, "c"));
    fb_shard_set_close(s);
}

static void refuses_each_bad_index(void **unused)
{
    (void)unused;
    static const struct {
        const char *index, *part;
    } cases[] = {
        { "{", "is not JSON" },
        { "{\"weight_map\":{\"a\":\"x\",\"a\":\"y\"}}", "unique keys" },
        { "{\"metadata\":{}}", "has no weight_map" },
        { "{\"weight_map\":{}}", "has no weight_map" },
        { "{\"weight_map\":{\"a\":1}}", "maps 'a' to something that is not a file name" },
        { "{\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"gone.safetensors\"}}",
          "names the file 'gone.safetensors', which is not" },
        { "{\"weight_map\":{\"a\":\"../one.safetensors\"}}", "expected the plain name" },
        { "{\"weight_map\":{\"a\":\"/etc/passwd\"}}", "expected the plain name" },
        { "{\"weight_map\":{\"a\":\"..\"}}", "expected the plain name" },
        { "{\"weight_map\":{\"a\":\"\"}}", "expected the plain name" },
        { "{\"weight_map\":{\"a\":\"link.safetensors\"}}", "a link that leads out of the folder" },
        { "{\"weight_map\":{\"b\":\"one.safetensors\",\"a\":\"two.safetensors\"}}",
          "places 'a' in two.safetensors, but one.safetensors holds it" },
        { "{\"weight_map\":{\"a\":\"one.safetensors\",\"c\":\"one.safetensors\"}}",
          "places 'c' in one.safetensors, which lacks it" },
        { "{\"weight_map\":{\"c\":\"one.safetensors\"}}", "does not name the tensor 'a' that one.safetensors holds" },
    };
    fb_error      err = { 0 };
    fb_shard_set *s = NULL;
    expect_failure(fb_shard_set_open(&s, temp_dir, &err), FB_INPUT, &err,
                   "holds neither model.safetensors nor model.safetensors.index.json");
    expect_failure(fb_shard_set_open(&s, temp_path("nowhere"), &err), FB_INPUT, &err, "holds neither");
    write_two_shards();
    assert_int_equal(symlink("/etc/passwd", temp_path("link.safetensors")), 0);
    for (size_t i = 0; i < FB_COUNT(cases); i++) {
        temp_write_text("model.safetensors.index.json", cases[i].index);
        expect_failure(fb_shard_set_open(&s, temp_dir, &err), FB_INPUT, &err, cases[i].part);
        assert_null(s);
    }
}

/* The hub's cache keeps the bytes in ../../blobs and links to them. */
static void the_hub_cache_layout_is_read(void **unused)
{
    (void)unused;
    fb_error      err = { 0 };
    fb_shard_set *s = NULL;
    assert_int_equal(fb_dir_make(temp_path("snapshots/rev"), &err), FB_OK);
    assert_int_equal(fb_dir_make(temp_path("blobs"), &err), FB_OK);
    write_shard("blobs/123", strlen(ONE("a")), ONE("a"), 4);
    assert_int_equal(symlink("../../blobs/123", temp_path("snapshots/rev/one.safetensors")), 0);
    temp_write_text("snapshots/rev/model.safetensors.index.json", "{\"weight_map\":{\"a\":\"one.safetensors\"}}");
    if (fb_shard_set_open(&s, temp_path("snapshots/rev"), &err) != FB_OK)
        fail_msg("%s", err.msg);
    fb_shard_set_close(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(reads_a_file, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(refuses_each_malformed_file, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(refuses_what_is_no_file, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(refuses_every_truncation, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(a_file_that_becomes_shorter_is_a_sentence, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(a_read_that_fails_is_a_sentence, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(a_set_is_what_the_index_names, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(refuses_each_bad_index, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(the_hub_cache_layout_is_read, temp_dir_make, temp_dir_remove),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
