"""One grader a file, by ``rm_type``; each a pure function of response, label and metadata."""
