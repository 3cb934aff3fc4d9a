/* Runs the case that the first argument names; `--list` prints all. */
#include <dirent.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/wait.h>

#include <fstream>
#include <iostream>

#include "case.hpp"

int main(int argc, char **argv) {
  if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
    for (const auto &each : cases()) std::cout << each.first << '\n';
    return 0;
  }
  auto found = argc == 2 ? cases().find(argv[1]) : cases().end();
  CHECK(found != cases().end());
  found->second();
  return 0;
}

std::size_t status_kib(const char *name) {
  std::ifstream file("/proc/self/status");
  std::string word;
  std::size_t kib = 0;
  while (file >> word) {
    if (word == std::string(name) + ":" && file >> kib) return kib;
  }
  CHECK(!"no such figure");
  return 0;
}

std::size_t mappings() {
  std::ifstream file("/proc/self/maps");
  std::string line;
  std::size_t count = 0;
  while (std::getline(file, line)) count++;
  return count;
}

std::size_t descriptors() {
  DIR *folder = opendir("/proc/self/fd");
  CHECK(folder != nullptr);
  std::size_t count = 0;
  while (readdir(folder) != nullptr) count++;
  closedir(folder);
  return count;
}

int in_child(const std::function<void()> &body) {
  pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    body();
    std::_Exit(0);
  }
  int status = 0;
  CHECK(waitpid(pid, &status, 0) == pid);
  return status;
}

static sigjmp_buf back;

bool raises(int number, const std::function<void()> &touch) {
  struct sigaction action {}, before {};
  action.sa_handler = [](int) { siglongjmp(back, 1); };
  CHECK(sigaction(number, &action, &before) == 0);
  bool raised = sigsetjmp(back, 1) != 0;
  if (!raised) touch();
  CHECK(sigaction(number, &before, nullptr) == 0);
  return raised;
}
