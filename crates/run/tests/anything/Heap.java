import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;

/** Sorts and looks up more than a small budget holds. */
public class Heap {
    public static void main(String[] arguments) {
        Random random = new Random(42);
        int[] numbers = new int[2_000_000];
        for (int at = 0; at < numbers.length; at++) {
            numbers[at] = random.nextInt();
        }
        java.util.Arrays.sort(numbers);
        long sum = 0;
        for (int number : numbers) {
            sum = sum * 31 + number;
        }
        List<Integer> list = new ArrayList<>();
        Map<Integer, String> map = new HashMap<>();
        for (int at = 0; at < 200_000; at++) {
            list.add(random.nextInt());
            map.put(list.get(at), "value " + at);
        }
        Collections.sort(list);
        for (int number : list) {
            sum = sum * 31 + map.get(number).hashCode();
        }
        System.out.println(sum + " " + map.size());
    }
}
