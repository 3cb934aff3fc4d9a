/* Loads a library, named by its first argument, that shall find its own names first. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MIB = 1 << 20 };

int main(int count, char **arguments) {
    void *library = dlopen(count > 1 ? arguments[1] : NULL, RTLD_NOW | RTLD_DEEPBIND);
    if (!library)
        return puts(dlerror()), 1;
    void (*take)(void *) = (void (*)(void *))dlsym(library, "take");
    char *(*grow)(void *, size_t) = (char *(*)(void *, size_t))dlsym(library, "grow");
    char *(*make)(size_t) = (char *(*)(size_t))dlsym(library, "make");
    for (int round = 0; round < 3; round++) {
        char *made = make(MIB);
        memset(made, 1, MIB);
        free(made);
        made = malloc(MIB);
        memset(made, 7, MIB);
        made = grow(made, 4 * MIB);
        if (made[0] != 7 || made[MIB - 1] != 7)
            return 2;
        take(made);
    }
    puts("done");
    return dlclose(library);
}
