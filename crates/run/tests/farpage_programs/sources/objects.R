# Fits a line, sorts, and groups.
x <- (seq_len(3e6) * 7919) %% 104729
y <- 3 * x + (seq_len(3e6) * 31) %% 17
fit <- lm.fit(cbind(1, x), y)
print(fit$coefficients, digits = 12)
words <- paste0("k", x[seq_len(4e5)])
print(head(sort(table(words), decreasing = TRUE)))
print(sum(sort(y)[seq(1, 3e6, 1000)]), digits = 15)
