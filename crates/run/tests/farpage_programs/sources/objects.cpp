// Fills a hash map, looks up, and erases.
#include <cstdint>
#include <cstdio>
#include <unordered_map>

int main() {
    std::unordered_map<uint64_t, uint64_t> map;
    uint64_t seed = 7;
    auto next = [&] { return seed = seed * 6364136223846793005u + 1442695040888963407u; };
    for (uint64_t i = 0; i < 1000000; i++) map[next() >> 20] = i;
    seed = 7;
    uint64_t sum = 0;
    for (uint64_t i = 0; i < 1000000; i++) {
        auto found = map.find(next() >> 20);
        sum = sum * 31 + found->second;
        if (i % 3 == 0) map.erase(found);
    }
    std::printf("%zu %llu\n", map.size(), static_cast<unsigned long long>(sum));
}
