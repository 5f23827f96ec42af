"""The scheduler's HTTP interface, a process of its own beside it: state, orders, events, dashboard.

What always holds: it holds no state that matters and decides nothing, so that it may die at any
moment; it asks the scheduler with keys of its own, with the rights of an operator and of
submitters, and every order says for whom; however many look, the scheduler is asked for its status
at most once a second and for its events once.
"""
