% Asserts facts, and sums over them.
:- dynamic fact/3.
fill(N, N) :- !.
fill(I, N) :-
    K is I * 7919 mod 10007,
    atom_concat(name, I, Name),
    assertz(fact(I, K, Name)),
    J is I + 1,
    fill(J, N).
main :-
    fill(0, 350000),
    aggregate_all(sum(K), fact(_, K, _), Sum),
    findall(K-I, fact(I, K, _), Pairs),
    msort(Pairs, Sorted),
    nth1(175000, Sorted, Middle),
    print(Sum), nl, print(Middle), nl.
:- initialization((main, halt)).
