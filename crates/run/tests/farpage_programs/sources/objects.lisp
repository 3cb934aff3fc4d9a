;; Fills a hash table, and sums over it.
(let ((table (make-hash-table :test 'equal)) (seed 7) (sum 0))
  (dotimes (i 1200000)
    (setf seed (mod (+ (* seed 1103515245) 12345) 2147483648))
    (push i (gethash (format nil "w~d" (mod (ash seed -8) 300000)) table)))
  (dotimes (key 300000)
    (dolist (i (gethash (format nil "w~d" key) table))
      (setf sum (mod (+ (* sum 31) i) 1000003))))
  (format t "~d ~d~%" (hash-table-count table) sum))
