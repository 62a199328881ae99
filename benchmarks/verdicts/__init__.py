"""A sweep of drawn faults over the guard: is any innocent sample, kernel or file lost to a wrong verdict?"""
