/* A library that is preloaded, and counts calls of `malloc` on their way to the next one. Says at
 * the end of another program than farpage that there were some. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

static unsigned long calls;

void *malloc(size_t size) {
    static void *(*next)(size_t);
    if (!next)
        next = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
    calls++;
    return next(size);
}

__attribute__((destructor)) static void end(void) {
    if (calls && strcmp(program_invocation_short_name, "farpage"))
        fputs("wrapped\n", stderr);
}
