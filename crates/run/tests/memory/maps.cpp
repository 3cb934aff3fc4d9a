// Small objects of C++: trees, hash tables, strings, aligned objects and exceptions. Prints sums of
// all, and says on standard error how many KiB of anonymous memory are local at the end.
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

struct alignas(128) Wide {
    long value;
};

int main() {
    std::vector<std::unique_ptr<Wide>> wide;
    std::map<std::string, long> tree;
    std::unordered_map<long, std::string> table;
    long errors = 0;
    for (long i = 0; i < 250000; i++) {
        std::string text = "a text that is too long for its object: " + std::to_string(i * 7919 % 1000003);
        table[i] = text;
        if (i % 4 == 0)
            tree[text] = i;
        if (i % 5 == 0)
            table.erase(i / 2);
        if (i % 100 == 0)
            wide.push_back(std::make_unique<Wide>(Wide{i}));
        if (i % 1000 == 0) {
            try {
                throw std::runtime_error(text);
            } catch (const std::exception &error) {
                errors += std::strlen(error.what());
            }
            char *bytes = new (std::nothrow) char[i % 7000 + 1];
            bytes[0] = 1;
            delete[] bytes;
        }
    }
    long sum = errors;
    for (auto &[key, text] : table)
        sum += key ^ static_cast<unsigned char>(text.back());
    for (auto &[text, value] : tree)
        sum = sum * 31 + value + static_cast<long>(text.size());
    for (auto &it : wide) {
        if (reinterpret_cast<std::uintptr_t>(it.get()) % alignof(Wide))
            return 1;
        sum += it->value;
    }
    std::cout << sum << std::endl;
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);)
        if (line.rfind("RssAnon:", 0) == 0)
            std::cerr << line << std::endl;
}
