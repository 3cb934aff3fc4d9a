// Sorts a typed array, and counts words in a map.
let seed = 7;
const next = () => (seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0);
const numbers = new Float64Array(8_000_000);
for (let i = 0; i < numbers.length; i++) numbers[i] = next();
numbers.sort();
const counts = new Map();
for (let i = 0; i < 900_000; i++) {
  const word = `word-${next() % 400_000}`;
  counts.set(word, (counts.get(word) ?? 0) + 1);
}
let sum = 0;
for (const [word, count] of counts) sum = (sum * 31 + count * word.length) % 1_000_003;
console.log(numbers[0], numbers[4_000_000], counts.size, sum);
