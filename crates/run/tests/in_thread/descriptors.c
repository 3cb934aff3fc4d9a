/* Programs that close or replace descriptors which they have not opened, as daemons and shells do.
 * Then their memory is as they left it, and nobody has written to their files. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES (16u << 20)
#define PAGE 4096

static int fail(const char *what) {
    printf("%s\n", what);
    return 1;
}

static void close_as(const char *how, int log) {
    if (!strcmp(how, "close"))
        for (int i = 3; i < 4096; i++)
            close(i);
    if (!strcmp(how, "close_range"))
        close_range(3, ~0u, 0);
    if (!strcmp(how, "closefrom"))
        closefrom(3);
    if (!strcmp(how, "replace"))
        for (int i = 3; i < 2048; i++)
            if (i != log) {
                dup2(log, i);
                syscall(SYS_dup3, log, i, O_CLOEXEC);
            }
}

/* Opens more descriptors than there are numbers below those of the runtime, and closes each. */
static int open_many(void) {
    enum { MANY = 6000 };
    static int made[MANY];
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    int count = 0;
    while (count < MANY && (made[count] = dup(0)) >= 0)
        count++;
    for (int i = 0; i < count; i++)
        if (close(made[i]) != 0)
            return fail("a descriptor of the program's own cannot be closed");
    return count > 0 ? 0 : fail("there are no descriptors");
}

int main(int argc, char **argv) {
    const char *how = argc > 1 ? argv[1] : "";
    int first = open("/dev/null", O_RDONLY);
    if (first != 3)
        return fail("the first descriptor is not 3");
    unsigned char *memory = malloc(BYTES);
    for (size_t i = 0; i < BYTES; i += PAGE)
        memory[i] = i / PAGE % 251;
    int log = -1;
    if (!strcmp(how, "replace"))
        log = memfd_create("log", 0);
    close_as(how, log);
    if (!strcmp(how, "many") && open_many() != 0)
        return 1;
    if (log < 0)
        log = memfd_create("log", 0);
    if (write(log, "mine\n", 5) != 5)
        return fail("the log cannot be written");
    for (int round = 0; round < 2; round++)
        for (size_t i = 0; i < BYTES; i += PAGE)
            if (memory[i]++ != i / PAGE % 251 + round)
                return fail("the memory has changed");
    memory = realloc(memory, BYTES + (4 << 20));
    if (memory[PAGE] != 3)
        return fail("the memory that has grown has changed");
    free(memory);
    memory = calloc(1, BYTES);
    for (size_t i = 0; i < BYTES; i += PAGE)
        if (memory[i])
            return fail("new memory is not zero");
    free(memory);
    struct stat of_log;
    char text[6] = "";
    if (fstat(log, &of_log) || pread(log, text, 5, 0) != 5 || of_log.st_size != 5 ||
        strcmp(text, "mine\n"))
        return fail("somebody else has written to the log");
    /* A child that closes everything is started all the same. */
    if (system("exec 3</dev/null 4<&3 3<&-") != 0)
        return fail("a shell cannot close its descriptors");
    puts("done");
    return 0;
}
