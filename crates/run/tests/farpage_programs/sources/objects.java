import java.util.Arrays;
import java.util.HashMap;

/** Sorts numbers, and counts them in a map. */
class Objects {
    public static void main(String[] arguments) {
        long[] numbers = new long[6_000_000];
        long seed = 7;
        for (int i = 0; i < numbers.length; i++) {
            seed = seed * 6364136223846793005L + 1442695040888963407L;
            numbers[i] = seed >>> 24;
        }
        Arrays.sort(numbers);
        HashMap<Long, Integer> counts = new HashMap<>();
        for (int i = 0; i < numbers.length; i += 6) {
            counts.merge(numbers[i] % 700_001, 1, Integer::sum);
        }
        long sum = 0;
        for (long key = 0; key < 700_001; key++) {
            sum = sum * 31 + counts.getOrDefault(key, 0);
        }
        System.out.println(numbers[0] + " " + numbers[3_000_000] + " " + counts.size() + " " + sum);
    }
}
