% Multiplies matrices, sorts, and sums.
x = reshape(mod((1:9e6) * 7919, 104729), 3000, 3000);
y = x(:, 1:400)' * x;
printf("%.0f\n", sum(y(:)));
[s, i] = sort(x(:));
printf("%.0f %.0f\n", s(4500000), sum(i(1:1000:end)));
z = cumsum(x, 2);
printf("%.0f\n", sum(z(:, end)));
