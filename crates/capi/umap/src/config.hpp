/* What the UMAP_ variables ask for, and messages.
 *
 * The rule it keeps: the environment is read once, at the first need, and what makes no sense
 * becomes the nearest thing that does, with a warning. */
#pragma once

#include <cstdint>
#include <string>

#include "farpage.h"

namespace Umap::shim {

struct Config {
  std::uint64_t page_bytes;
  std::uint64_t buffer_pages;
  std::uint64_t fillers;
  std::uint64_t evictors;
  std::uint64_t max_fault_events;
  /* Pages; `has_read_ahead` says whether it was asked for. */
  std::uint64_t read_ahead;
  bool has_read_ahead;
  /* Percent of the buffer. */
  std::uint64_t high_water;
  std::uint64_t low_water;
  /* One of the FARPAGE_LOG_ constants. */
  std::uint32_t log_level;
};

const Config &config();

/* Prints a line if UMAP_LOG_LEVEL includes the level. */
void log(std::uint32_t level, const std::string &text);

/* A runtime as `config` says, on these servers (none if empty). On failure null, with the code in
 * `*code`. */
farpage_runtime *new_runtime(const std::string &servers, farpage_code *code);

/* The errno that says what a code says. */
int errno_of(farpage_code code);

/* Logs what farpage said last in this thread. */
void log_failure(const std::string &what);

}  // namespace Umap::shim
