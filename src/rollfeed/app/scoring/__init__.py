"""Parts of the reward hub of a run: functions of users, and the model that scores."""
