/* Loads the library that the first argument names. */
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

int main(int count, char **arguments) {
    alarm(30);
    if (count > 1 && dlopen(arguments[1], RTLD_NOW)) return 0;
    fprintf(stderr, "%s\n", dlerror());
    return 1;
}
