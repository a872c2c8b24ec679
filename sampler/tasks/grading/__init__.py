"""Grading answers: grader processes in the sandbox, and threads for what brings its own."""
