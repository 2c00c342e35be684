"""How fast the code is: time, memory and multiply-adds, each against a limit."""
