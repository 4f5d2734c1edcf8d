#include "bus_error.h"

#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

/* A line of /proc/self/maps: "7f00-7fff r--p 00000000 08:01 1234    /path".  Nothing here may allocate or lock: it runs in a signal
 * handler, wherever the process was. */
enum { LINE_SIZE = 4096 + 128 };

static uintptr_t take_hex(const char **s)
{
    uintptr_t n = 0;
    for (;; (*s)++) {
        unsigned digit = 16;
        if (**s >= '0' && **s <= '9')
            digit = (unsigned)(**s - '0');
        else if (**s >= 'a' && **s <= 'f')
            digit = (unsigned)(**s - 'a' + 10);
        if (digit == 16)
            return n;
        n = n << 4 | digit;
    }
}

static bool holds(const char *line, uintptr_t address)
{
    uintptr_t first = take_hex(&line);
    if (*line++ != '-')
        return false;
    return address >= first && address < take_hex(&line);
}

/* Leaves in line the mapping that holds the address; false: none, or it has no file. */
static bool find_mapping(char line[LINE_SIZE], uintptr_t address)
{
    char   piece[1024];
    size_t length = 0;
    bool   found = false;
    int    fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    for (ssize_t n; fd >= 0 && !found && (n = read(fd, piece, sizeof piece)) > 0;)
        for (ssize_t i = 0; i < n && !found; i++) {
            if (piece[i] != '\n') {
                line[length] = (unsigned char)piece[i] < 0x20 || piece[i] == 0x7f ? '?' : piece[i];
                length += length < LINE_SIZE - 1;
                continue;
            }
            line[length] = 0;
            length = 0;
            found = holds(line, address);
        }
    if (fd >= 0)
        close(fd);
    return found && strchr(line, '/');
}

static void write_text(const char *text)
{
    for (size_t n = strlen(text); n;) {
        ssize_t sent = write(STDERR_FILENO, text, n);
        if (sent <= 0)
            return;
        text += sent;
        n -= (size_t)sent;
    }
}

static void on_bus_error(int sig, siginfo_t *info, void *context)
{
    char line[LINE_SIZE];
    (void)context;
    if (info->si_code != BUS_ADRERR || !find_mapping(line, (uintptr_t)info->si_addr)) {
        signal(sig, SIG_DFL); /* a fault of ours, or of the memory: it comes again, and ends the process */
        return;
    }
    write_text("forebay: ");
    write_text(strchr(line, '/'));
    write_text(": became shorter, or its disk failed, while it was being read; put the file back and start again\n");
    _exit(1);
}

void fb_bus_error_catch(void)
{
    struct sigaction action = { .sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO };
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, NULL);
}
